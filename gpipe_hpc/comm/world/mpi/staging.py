"""Transfer of device tensors in blocks through pinned host memory, overlapping copies and work.

Two buffers alternate: while one block is sent, summed or received, the copy of the next or previous
one is in progress (the pipeline of MVAPICH2-GPU: Wang et al., 2011). So a long message takes about
as long as the slower of link and copies, not the sum of both.
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
"""Processes a block in host memory; returns when the block may be overwritten."""


class StagingState:
    """State of a tensor's transfer through the host.

    `behind` is the event at the end of the device work that precedes the transfer. `done` is the
    event at the end of the last copy to the device; None until that is enqueued or if there is
    none.
    """

    def __init__(self, behind: Event) -> None:
        self.behind = behind
        self.done: Event | None = None


class HostStaging:
    """Transfers tensors of one device through the host."""

    def __init__(self, device: Device, block_bytes: int = BLOCK_BYTES) -> None:
        self.device, self._block_bytes = device, block_bytes
        self._pool = PinnedPool(device)

    def begin(self) -> StagingState:
        """Return the state of a transfer that waits for work now queued on the current stream."""
        return StagingState(self.device.current_stream().record_event())

    def through(
        self, tensor: torch.Tensor, stage: StagingState, job: Job, *, reads: bool, writes: bool
    ) -> None:
        """Run `job` on each block of a contiguous tensor, in order; on any thread.

        Args:
            tensor: the device tensor.
            stage: its state.
            job: work on a block in host memory.
            reads: whether blocks are copied to the host before.
            writes: whether blocks are copied to the device afterwards.
        """
        self.device.use()
        flat = tensor.view(-1)
        blocks = torch.split(flat, max(1, self._block_bytes // flat.element_size()))
        longest = blocks[0].numel() * flat.element_size()
        buffers = [self._pool.take(longest) for _ in blocks[:_NUM_BUFFERS]]
        way = _StagedTransfer(self.device, self._leaving, self._arriving, blocks, buffers)
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
                    stage.done = way.to_device(number)
        finally:
            way.give_back(self._pool)
            if reads:
                self.device.keep_for_stream(tensor, self._leaving)

    def directly(self, tensor: torch.Tensor, stage: StagingState, job: Job) -> None:
        """Run `job` on the tensor in device memory, on a side stream; on any thread.

        MPI does not support streams, so the host waits until the tensor may be used.
        """
        self.device.use()
        stage.behind.synchronize()
        with self.device.on(self._leaving):
            job(tensor.view(-1))
            stage.done = self._leaving.record_event()

    # Created on first use, because torch has few streams per device.

    @cached_property
    def _leaving(self) -> Stream:
        return self.device.stream()

    @cached_property
    def _arriving(self) -> Stream:
        return self.device.stream()


class _StagedTransfer:
    """A tensor in transfer, block by block; each block uses one of two alternating buffers."""

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
        """Start copying a block to the host, once its buffer is free."""
        at = number % len(self._buffers)
        before = self._brought[at]
        if before is not None:
            self._leaving.wait_event(before)
        with self._device.on(self._leaving):
            self._device.copy_to_host(self._memory(number), self._blocks[number])
            self._fetched[at] = self._leaving.record_event()

    def host(self, number: int, *, reads: bool) -> torch.Tensor:
        """Return a block's host memory, once the preceding copies allow its use."""
        at = number % len(self._buffers)
        awaited = self._fetched[at] if reads else self._brought[at]
        if awaited is not None:
            awaited.synchronize()
        return self._memory(number)

    def to_device(self, number: int) -> Event:
        """Start copying a block to the device; return the event that marks the end of the copy."""
        with self._device.on(self._arriving):
            self._device.copy_to_device(self._blocks[number], self._memory(number))
            brought = self._arriving.record_event()
        self._brought[number % len(self._buffers)] = brought
        return brought

    def give_back(self, pool: PinnedPool) -> None:
        """Release the buffers, which are reused once no copy uses them."""
        for buffer, fetched, brought in zip(
            self._buffers, self._fetched, self._brought, strict=True
        ):
            pool.release(buffer, until=brought or fetched)

    def _memory(self, number: int) -> torch.Tensor:
        block = self._blocks[number]
        return self._buffers[number % len(self._buffers)].flat(block.numel(), block.dtype)
