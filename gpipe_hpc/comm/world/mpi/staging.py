"""A device's tensor in blocks through pinned memory, beside what is done with them on the host.

Two buffers take turns: while one block is sent, summed or received, the copy of the next one, or
of the one before, is under way (the pipeline of MVAPICH2-GPU: Wang et al., 2011). So a long message
takes about as long as the slower of the link and the copies, not both after one another.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import torch

from gpipe_hpc.comm.transport.pool import Buffer, PinnedPool
from gpipe_hpc.device.device import Device, Event, Stream

BLOCK_BYTES: Final = 512 * 1024
_NUM_BUFFERS: Final = 2

Job = Callable[[torch.Tensor], None]
"""Does on the host what is to be done with a block; returns when the block is free again."""


class Stage:
    """Where a tensor's way through the host stands.

    `behind`: what the device does before, with or to the tensor. `done`: the last copy to the
    device, if there is any; None until it has been put there.
    """

    def __init__(self, behind: Event) -> None:
        self.behind = behind
        self.done: Event | None = None


class Stager:
    """Takes tensors of one device through the host."""

    def __init__(self, device: Device, block_bytes: int = BLOCK_BYTES) -> None:
        self.device, self._block_bytes = device, block_bytes
        self._pool = PinnedPool(device)

    def begin(self) -> Stage:
        """Return a stage behind all that the current stream has to do so far."""
        return Stage(self.device.current_stream().record_event())

    def through(
        self, tensor: torch.Tensor, stage: Stage, job: Job, *, reads: bool, writes: bool
    ) -> None:
        """Do `job` with each block of a tensor without gaps, in order; on any thread.

        `reads`: the block has the tensor's values then. `writes`: what it has after goes back.
        """
        self.device.use()
        flat = tensor.view(-1)
        blocks = torch.split(flat, max(1, self._block_bytes // flat.element_size()))
        longest = blocks[0].numel() * flat.element_size()
        buffers = [self._pool.take(longest) for _ in blocks[:_NUM_BUFFERS]]
        way = _Way(self.device, self._leaving, self._arriving, blocks, buffers)
        try:
            if reads:
                self._leaving.wait_event(stage.behind)
                way.fetch(0)
            else:
                self._arriving.wait_event(stage.behind)
            for number in range(len(blocks)):
                if reads and number + 1 < len(blocks):
                    way.fetch(number + 1)
                job(way.host(number, reads=reads))
                if writes:
                    stage.done = way.bring(number)
        finally:
            way.give_back(self._pool)
            if reads:
                self.device.lend(tensor, self._leaving)

    def directly(self, tensor: torch.Tensor, stage: Stage, job: Job) -> None:
        """Do `job` with the elements of a tensor where they are, on a stream beside; on any thread.

        MPI knows of no streams, so the host waits until the tensor may be used.
        """
        self.device.use()
        stage.behind.synchronize()
        with self.device.on(self._leaving):
            job(tensor.view(-1))
            stage.done = self._leaving.record_event()

    # Made when first needed: torch has few streams for each device.

    @cached_property
    def _leaving(self) -> Stream:
        return self.device.stream()

    @cached_property
    def _arriving(self) -> Stream:
        return self.device.stream()


class _Way:
    """Blocks on their way, each by one of the buffers in turn."""

    def __init__(
        self,
        device: Device,
        leaving: Stream,
        arriving: Stream,
        blocks: Sequence[torch.Tensor],
        buffers: Sequence[Buffer],
    ) -> None:
        self._device, self._leaving, self._arriving = device, leaving, arriving
        self._blocks, self._buffers = blocks, buffers
        self._fetched: list[Event | None] = [None] * len(buffers)
        self._brought: list[Event | None] = [None] * len(buffers)

    def fetch(self, number: int) -> None:
        """Start the copy of a block to the host, behind that from its buffer to the device."""
        at = number % len(self._buffers)
        before = self._brought[at]
        if before is not None:
            self._leaving.wait_event(before)
        with self._device.on(self._leaving):
            self._device.fetch_into(self._memory(number), self._blocks[number])
            self._fetched[at] = self._leaving.record_event()

    def host(self, number: int, *, reads: bool) -> torch.Tensor:
        """Return a block's memory on the host, once it may be read, or written to."""
        at = number % len(self._buffers)
        awaited = self._fetched[at] if reads else self._brought[at]
        if awaited is not None:
            awaited.synchronize()
        return self._memory(number)

    def bring(self, number: int) -> Event:
        """Start the copy of a block to the device; return the mark behind it."""
        with self._device.on(self._arriving):
            self._device.bring_into(self._blocks[number], self._memory(number))
            brought = self._arriving.record_event()
        self._brought[number % len(self._buffers)] = brought
        return brought

    def give_back(self, pool: PinnedPool) -> None:
        """Give back the buffers, to be used again once no copy uses them."""
        for buffer, fetched, brought in zip(
            self._buffers, self._fetched, self._brought, strict=True
        ):
            pool.release(buffer, until=brought or fetched)

    def _memory(self, number: int) -> torch.Tensor:
        block = self._blocks[number]
        return self._buffers[number % len(self._buffers)].flat(block.numel(), block.dtype)
