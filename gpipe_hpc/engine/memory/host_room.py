"""Pinned host memory for what one stage moves out and back: made once, used step after step.

To pin memory takes the system longer than a copy; what torch keeps of it is rounded up to powers of
two.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gpipe_hpc.comm.device import Device, Event


class _Free(NamedTuple):
    """A buffer, and the number of the fetch that reads it last."""

    buffer: torch.Tensor
    fetch: int


class HostRoom:
    """Pinned buffers by size, and the streams that copies to them and from them run on.

    A stream for each direction, as links carry both at once: where a schedule moves one micro-batch
    out while another one comes back, neither waits for the other. A buffer is written again once
    the copy from it is done, which the stream of copies out waits for, not the host.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.out, self.back = device, device.stream(), device.stream()
        self._free: dict[int, deque[_Free]] = defaultdict(deque)
        self._unused: dict[int, deque[_Free]] = defaultdict(deque)  # in this step so far
        self._num_fetches = self._num_awaited = 0
        self._ends: dict[int, Event] = {}  # of fetches that copies out have not waited for

    @contextmanager
    def going_out(self) -> Iterator[None]:
        """Return a block of copies out, behind what the current stream has to do so far."""
        self.out.wait_stream(self.device.current_stream())
        with self.device.on(self.out):
            yield

    @contextmanager
    def coming_back(self, behind: Event) -> Iterator[None]:
        """Return a block of copies back, behind a mark in the stream of copies out."""
        self.back.wait_event(behind)
        with self.device.on(self.back):
            yield

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
        """End a step: buffers of sizes that it did not use are let go of, and who read them."""
        self._unused, self._free = self._free, defaultdict(deque)
        readers = {free.fetch for known in self._unused.values() for free in known}
        self._ends = {number: end for number, end in self._ends.items() if number in readers}

    def _await(self, fetch: int) -> None:
        # Fetches end in their order.
        if fetch > self._num_awaited:
            self.out.wait_event(self._ends[fetch])
            self._ends = {number: end for number, end in self._ends.items() if number > fetch}
            self._num_awaited = fetch
