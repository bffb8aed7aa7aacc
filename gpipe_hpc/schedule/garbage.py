"""Pause of Python's garbage collector while large tables are built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable cyclic garbage collection in a with statement or, as a decorator, in a function.

    A table of a million actions consists of a million small tuples without reference cycles;
    scanning them repeatedly would take longer than creating them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
