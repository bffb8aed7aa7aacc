"""Conversion of tensors between device memory and the lanes that send them.

Host tensors are sent directly. Accelerator tensors use a lane of the device's backend (such as
NCCL) if there is one and the receiver has posted a buffer; otherwise they are copied to pinned
memory and use a host lane. These copies run on separate streams and overlap with compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import torch

from gpipe_hpc.comm.transport.lanes import Lane, LaneWork
from gpipe_hpc.comm.transport.pool import Buffer, PinnedPool
from gpipe_hpc.comm.transport.wire import TensorMeta, as_bytes, flat, packed
from gpipe_hpc.device.device import Device, Event, HostDevice, Stream


class TensorLanes(NamedTuple):
    """The lanes for the tensors of one message.

    `host` sends host tensors. `device` uses the device's backend; None if there is no such lane or
    the receiver could not post a buffer on it.
    """

    host: Lane
    device: Lane | None


class PostedReceive(Protocol):
    """A posted receive."""

    def wait(self) -> torch.Tensor:
        """Return the tensor, ready for use on the current stream."""

    def drop(self) -> None:
        """Discard the tensor once it has arrived, so that its memory is reused."""


@dataclass(eq=False, slots=True)
class OutgoingTensor:
    """A tensor to be sent.

    Args:
        lane: the lane on which the tensor is sent.
        tensor: the tensor, which stays alive until it is sent.
        ready: event for which the host has to wait before sending.
        on_stream: whether the send is ordered by the device's stream.
        buffer: the tensor's pinned buffer, to be released afterwards.
    """

    lane: Lane
    tensor: torch.Tensor
    ready: Event | None = None
    on_stream: bool = False
    buffer: Buffer | None = None

    def start(self) -> LaneWork:
        """Start sending the tensor on its lane."""
        return self.lane.send(self.tensor)


class Payload:
    """Posts receives of tensors and prepares tensors to be sent."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool = PinnedPool(device)

    def receive_word(
        self, lane: Lane, length: int, dtype: torch.dtype = torch.int64
    ) -> PostedReceive:
        """Post a receive of a small host tensor, such as an announcement or a header."""
        tensor = _HOST.empty((length,), dtype)
        return _Direct(tensor, lane.receive(tensor))

    def receive(self, metas: Sequence[TensorMeta], ways: TensorLanes) -> list[PostedReceive]:
        """Post receives of the tensors described by `metas`; empty tensors are not sent."""
        return [self._receive(meta, ways) for meta in metas]

    def _receive(self, meta: TensorMeta, ways: TensorLanes) -> PostedReceive:
        if not meta.num_elements:
            return _Direct(meta.allocate(self.device), None)
        if not self._is_apart(meta):
            tensor = meta.allocate(self.device)
            return _Direct(tensor, ways.host.receive(flat(tensor)))
        if ways.device is not None:
            tensor = meta.allocate(self.device)
            return _Direct(tensor, ways.device.receive(as_bytes(tensor)))
        buffer = self.pool.take(meta.num_bytes)
        return _Staged(self, meta, buffer, ways.host.receive(buffer.flat(meta.num_bytes, _BYTE)))

    def send(
        self, tensors: Sequence[torch.Tensor], metas: Sequence[TensorMeta], ways: TensorLanes
    ) -> list[OutgoingTensor]:
        """Prepare tensors to be sent; called on the thread that computed them."""
        pairs = zip(tensors, metas, strict=True)
        return [self._send(tensor, meta, ways) for tensor, meta in pairs if meta.num_elements]

    def _send(self, tensor: torch.Tensor, meta: TensorMeta, ways: TensorLanes) -> OutgoingTensor:
        tensor = packed(tensor, meta)
        if not self._is_apart(meta):
            return OutgoingTensor(ways.host, flat(tensor))
        if ways.device is not None:
            return OutgoingTensor(ways.device, as_bytes(tensor), on_stream=True)
        return self._staged(tensor, meta, ways.host)

    def _staged(self, tensor: torch.Tensor, meta: TensorMeta, lane: Lane) -> OutgoingTensor:
        """Start copying a tensor to pinned memory, after the work that computes it."""
        device, buffer = self.device, self.pool.take(meta.num_bytes)
        self._leaving.wait_stream(device.current_stream())
        with device.on(self._leaving):
            device.copy_to_host(buffer.flat(meta.num_elements, meta.dtype), flat(tensor).view(-1))
            copied = self._leaving.record_event()
        device.keep_for_stream(tensor, self._leaving)
        return OutgoingTensor(lane, buffer.flat(meta.num_bytes, _BYTE), ready=copied, buffer=buffer)

    def fill(self, metas: Sequence[TensorMeta], ways: TensorLanes) -> list[OutgoingTensor]:
        """Return parts of zeros, for a receiver that has posted buffers it does not need."""
        return [self._filler(meta, ways) for meta in metas if meta.num_elements]

    def _filler(self, meta: TensorMeta, ways: TensorLanes) -> OutgoingTensor:
        if self._is_apart(meta) and ways.device is not None:
            zeros = self.device.empty((meta.num_bytes,), _BYTE).zero_()
            return OutgoingTensor(ways.device, zeros, on_stream=True)
        return OutgoingTensor(ways.host, _HOST.empty((meta.num_bytes,), _BYTE).zero_())

    def _is_apart(self, meta: TensorMeta) -> bool:
        """Return whether a tensor is in device memory, which host lanes cannot access."""
        return self.device.is_accelerator and meta.on_device

    def gone(self, part: OutgoingTensor) -> None:
        """Release the pinned buffer of a part that has been sent."""
        if part.buffer is not None:
            self.pool.release(part.buffer)

    # Created on first use, because torch has few streams per device.

    @cached_property
    def _leaving(self) -> Stream:
        return self.device.stream()

    @cached_property
    def _arriving(self) -> Stream:
        return self.device.stream()

    def to_device(self, buffer: Buffer, meta: TensorMeta) -> torch.Tensor:
        """Copy a tensor from pinned memory to the device and release the buffer."""
        device = self.device
        with device.on(self._arriving):
            own = meta.allocate(device)
            device.copy_to_device(flat(own).view(-1), buffer.flat(meta.num_elements, meta.dtype))
            copied = self._arriving.record_event()
        self.pool.release(buffer, until=copied)
        current = device.current_stream()
        current.wait_event(copied)
        device.keep_for_stream(own, current)  # allocated on the other stream
        return own


class _Direct(NamedTuple):
    tensor: torch.Tensor
    work: LaneWork | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor

    def drop(self) -> None:
        self.wait()


class _Staged(NamedTuple):
    payload: Payload
    meta: TensorMeta
    buffer: Buffer
    work: LaneWork

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.payload.to_device(self.buffer, self.meta)

    def drop(self) -> None:
        self.work.wait()
        self.payload.pool.release(self.buffer)


_BYTE: Final = torch.uint8
_HOST: Final = HostDevice()
