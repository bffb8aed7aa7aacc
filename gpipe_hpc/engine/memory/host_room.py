"""Pinned host memory for what a rank moves out and back: made once, used step after step.

To pin memory takes the system longer than a copy; what torch keeps of it is rounded up to powers of
two.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from gpipe_hpc.comm.device import Device, Event


class _Free(NamedTuple):
    """A buffer, and the number of the fetch that reads it last."""

    buffer: torch.Tensor
    fetch: int


class Leaving(Protocol):
    """Something on its way to the host, whose memory on the device is still there."""

    def let_go(self) -> None:
        """Let go of that memory."""


class HostRoom:
    """Pinned buffers by size, and the streams that copies to them and from them run on; of a rank.

    A stream for each direction, as links carry both at once: where a schedule moves one micro-batch
    out while another one comes back, neither waits for the other. A buffer is written again once
    the copy from it is done, which the stream of copies out waits for, not the host.

    One action of compute runs beside a copy out. Ahead of the next one, and of what is fetched,
    `make_room` lets the compute wait for the copy and lets go of what has left. So no more memory
    waits for copies than a plan counts. It is free in the order of the compute, and nothing is lent
    to another stream. What is received is not waited for so: sends behind it would wait, too.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.out, self.back = device, device.stream(), device.stream()
        self._free: dict[int, deque[_Free]] = defaultdict(deque)
        self._unused: dict[int, deque[_Free]] = defaultdict(deque)  # in this step so far
        self._num_fetches = self._num_awaited = 0
        self._ends: dict[int, Event] = {}  # of fetches that copies out have not waited for
        # Copies out that no action of compute has run beside so far, and those that one has.
        self._leaving: list[tuple[Leaving, Event]] = []
        self._left: list[tuple[Leaving, Event]] = []

    @contextmanager
    def going_out(self, who: Leaving) -> Iterator[None]:
        """Return a block of copies out, behind what the current stream has to do so far."""
        self.out.wait_stream(self.device.current_stream())
        try:
            with self.device.on(self.out):
                yield
        finally:  # copies may run, even if one more could not be ordered
            self._leaving.append((who, self.out.record_event()))

    @contextmanager
    def coming_back(self) -> Iterator[None]:
        """Return a block of copies back, behind what the current stream has to do so far."""
        self.back.wait_stream(self.device.current_stream())
        with self.device.on(self.back):
            yield

    def before_compute(self) -> None:
        """Make room for an action of compute; what is on its way out now has that beside it."""
        self.make_room()
        self._left, self._leaving = self._leaving, []

    def make_room(self) -> None:
        """Let the compute wait for what an action of it has run beside, and let go of that."""
        going, self._left = self._left, []
        current = self.device.current_stream()
        for who, is_gone in going:
            current.wait_event(is_gone)
            who.let_go()

    def take_back(self, who: Leaving) -> Event | None:
        """Return the end of a copy out that nothing ran beside yet, and forget it; None if gone."""
        for going in self._leaving:
            if going[0] is who:
                self._leaving.remove(going)
                return going[1]
        return None

    def give_back(self, buffers: Iterable[torch.Tensor]) -> None:
        """Take buffers back that copies out have written, and nobody reads."""
        for buffer in buffers:
            self._free[buffer.numel()].append(_Free(buffer, 0))

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer, uint8[num_bytes], for a copy that is put on the stream of copies out."""
        for known in (self._free, self._unused):
            if known[num_bytes]:
                free = known[num_bytes].popleft()
                self._await(free.fetch)
                return free.buffer
        return self.device.pinned((num_bytes,), torch.uint8)

    def end_fetch(self, buffers: list[torch.Tensor]) -> Event:
        """Take buffers back whose copies are on the stream of copies back; return their end."""
        self._num_fetches += 1
        end = self._ends[self._num_fetches] = self.back.record_event()
        for buffer in buffers:
            self._free[buffer.numel()].append(_Free(buffer, self._num_fetches))
        return end

    def end(self) -> None:
        """End a step, also one that failed.

        Memory that copies read or write is free behind them. Buffers of sizes that the step did not
        use are let go of, and who read them.
        """
        self._left += self._leaving
        self._leaving = []
        self.make_room()
        for copies in (self.out, self.back):  # also copies out that were taken back at once
            self.device.current_stream().wait_stream(copies)
        self._unused, self._free = self._free, defaultdict(deque)
        readers = {free.fetch for known in self._unused.values() for free in known}
        self._ends = {number: end for number, end in self._ends.items() if number in readers}

    def _await(self, fetch: int) -> None:
        # Fetches end in their order.
        if fetch > self._num_awaited:
            self.out.wait_event(self._ends[fetch])
            self._ends = {number: end for number, end in self._ends.items() if number > fetch}
            self._num_awaited = fetch
