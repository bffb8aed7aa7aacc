"""How tensors get on and off the wire, by where they live and what carries them."""

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from gpipe_hpc.comm.transport.wire import TensorMeta


class Lane(NamedTuple):
    """A stream of messages between two ranks that keeps its order."""

    group: dist.ProcessGroup
    tag: int


class Receiving(Protocol):
    """A posted receive."""

    def wait(self) -> torch.Tensor:
        """Return the tensor, ready for use on the current stream."""


class Payload(Protocol):
    """Start sends and receives of tensors."""

    def receive_word(
        self, lane: Lane, peer: int, length: int, dtype: torch.dtype = torch.int64
    ) -> Receiving:
        """Post a receive of a small tensor that the host will read."""

    def receive(self, lane: Lane, peer: int, meta: TensorMeta) -> Receiving:
        """Post a receive of a boundary tensor."""

    def prepare(self, tensor: torch.Tensor) -> "Sendable":
        """Make a tensor ready to leave; called on the thread that computed it."""

    @property
    def completes_on_stream(self) -> bool:
        """Say whether a send is finished on the GPU's time line rather than the host's."""


class Sendable(Protocol):
    """A tensor on its way out."""

    def start(self, lane: Lane, peer: int) -> dist.Work | None:
        """Start sending; called in the order of the channel."""


class _Direct(NamedTuple):
    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


class _Outgoing(NamedTuple):
    tensor: torch.Tensor

    def start(self, lane: Lane, peer: int) -> dist.Work | None:
        return dist.isend(self.tensor, peer, group=lane.group, tag=lane.tag)


def _post(tensor: torch.Tensor, lane: Lane, peer: int) -> _Direct:
    return _Direct(tensor, dist.irecv(tensor, peer, group=lane.group, tag=lane.tag))


class DirectPayload:
    """Tensors travel as they are: CPU tensors over Gloo, CUDA tensors over NCCL.

    Over NCCL `wait` orders streams and returns at once; words are CPU tensors and use the
    Gloo half of the same group.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.completes_on_stream = device.type == "cuda"

    def receive_word(
        self, lane: Lane, peer: int, length: int, dtype: torch.dtype = torch.int64
    ) -> Receiving:
        """Post into host memory."""
        return _post(torch.empty(length, dtype=dtype), lane, peer)

    def receive(self, lane: Lane, peer: int, meta: TensorMeta) -> Receiving:
        """Post into the memory of the device."""
        return _post(meta.allocate(self._device), lane, peer)

    def prepare(self, tensor: torch.Tensor) -> Sendable:
        """Send the tensor itself."""
        return _Outgoing(tensor)


class StagedPayload:
    """CUDA tensors over a transport that only takes host memory: through pinned buffers.

    Copies run on a stream of their own; the sending thread waits for the copy's event, the
    computing thread waits for nothing.
    """

    completes_on_stream = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._copies = stream(device)

    def receive_word(
        self, lane: Lane, peer: int, length: int, dtype: torch.dtype = torch.int64
    ) -> Receiving:
        """Post into host memory."""
        return _post(torch.empty(length, dtype=dtype), lane, peer)

    def receive(self, lane: Lane, peer: int, meta: TensorMeta) -> Receiving:
        """Post into pinned memory; `wait` copies to the device."""
        pinned = torch.empty(meta.shape, dtype=meta.dtype, pin_memory=True)
        return _StagedReceiving(_post(pinned, lane, peer), self._device)

    def prepare(self, tensor: torch.Tensor) -> Sendable:
        """Start the copy to pinned memory behind the work that makes the tensor."""
        if not tensor.is_cuda:
            return _Outgoing(tensor)
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copies):
            pinned.copy_(tensor, non_blocking=True)
            copied = self._copies.record_event()
        tensor.record_stream(self._copies)
        return _StagedOutgoing(pinned, copied)


class _StagedReceiving(NamedTuple):
    posted: _Direct
    device: torch.device

    def wait(self) -> torch.Tensor:
        # The caching host allocator keeps the pinned block until the copy has run.
        return self.posted.wait().to(self.device, non_blocking=True)


class _StagedOutgoing(NamedTuple):
    pinned: torch.Tensor
    copied: torch.cuda.Event

    def start(self, lane: Lane, peer: int) -> dist.Work | None:
        self.copied.synchronize()
        return dist.isend(self.pinned, peer, group=lane.group, tag=lane.tag)
