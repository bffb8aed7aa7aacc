"""Two hosts for a test: network namespaces of this machine, joined by the relay of the project."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from experiments.two_hosts import LackingError, TwoHosts

Make = Callable[..., TwoHosts]


@contextmanager
def made_hosts() -> Iterator[Make]:
    """Give a function that makes a pair of hosts, all of which end with the block.

    It takes what `TwoHosts` takes; the link between them has 100 Mbit/s and 5 ms by default. It
    skips the test, with the reason, where this machine does not allow it.
    """
    with ExitStack() as stack:

        def make(rate: float = 100e6, delay_s: float = 0.005, **options: Any) -> TwoHosts:
            try:
                return stack.enter_context(TwoHosts(rate, delay_s, **options))
            except LackingError as error:
                pytest.skip(f"no two hosts here: {error}")

        yield make
