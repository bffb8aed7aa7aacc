"""What is said of buffers on the ranks that hold a copy of one stage: each once, by name."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.sums.fetched import Fetched

log = logging.getLogger("gpipe_hpc.pipeline")

_MAX_SHOWN: Final = 12
_DIFFER: Final = (
    "differ between the {size} ranks that hold them and have no average (integers "
    "or bools); those of rank {first} are given to all"
)


class _Compared(NamedTuple):
    """How many holders had buffers otherwise than the first of them, on its way to the host."""

    names: Sequence[str]
    counts: Fetched
    first: int


class Sayings:
    """Says what becomes of buffers, on the first rank of a group alone.

    What hangs on values of a device is said when these have come to the host.
    """

    def __init__(self, group: Group, position: int) -> None:
        self._group, self._position = group, position
        self._said: set[str] = set()
        self._compared: deque[_Compared] = deque()

    def ends_with(self, owner: object) -> None:
        """Say what is known by then when `owner` is dropped, or the process ends.

        Nothing is waited for: after a failure a device may never come to it.
        """
        weakref.finalize(owner, self._at_end)

    def _at_end(self) -> None:
        with suppress(RuntimeError):  # of a device that is gone
            self.say_known()

    def compare(self, names: Sequence[str], counts: Fetched, first: int) -> None:
        """Take note of how many holders had each buffer otherwise than the one at `first`."""
        self._compared.append(_Compared(names, counts, first))

    def say_known(self) -> None:
        """Say which buffers differed, of which that is known by now: on a CPU, at once."""
        self._say_compared(Fetched.poll)

    def say_all(self) -> None:
        """Say which buffers differed; waits for the device that has compared them."""
        self._say_compared(Fetched.read)

    def _say_compared(self, values: Callable[[Fetched], torch.Tensor | None]) -> None:
        while self._compared:
            names, fetched, first = self._compared[0]
            counts = values(fetched)
            if counts is None:
                return
            self._compared.popleft()
            apart = [name for name, count in zip(names, counts.tolist(), strict=True) if count]
            self.say(apart, logging.WARNING, _DIFFER, first)

    def say(self, names: Iterable[str], level: int, what: str, first: int = 0) -> None:
        """Say something of buffers once; in `what` stand {size} and {first}, a position."""
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        if new and self._position == 0:
            shown = ", ".join(new[:_MAX_SHOWN])
            shown += f", ... ({len(new)} in all)" if len(new) > _MAX_SHOWN else ""
            filled = what.format(size=self._group.size, first=self._group.ranks[first])
            log.log(level, "buffers that forwards change: %s %s", shown, filled)
