"""The garbage collector, out of the way while tables are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the search for circular garbage; use as a decorator or in a with statement.

    A table of a million actions is a million small tuples, none in a circle; looking through them
    again and again takes longer than making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
