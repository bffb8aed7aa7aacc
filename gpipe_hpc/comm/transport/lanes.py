"""Lanes: ordered queues of tensors between two ranks."""

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist


class LaneWork(Protocol):
    """A send or receive in progress."""

    def wait(self) -> object:
        """Block until completion; with a device backend, make the current stream wait instead.

        Raises RuntimeError if the operation failed.
        """

    def is_completed(self) -> bool:
        """Return whether the operation is complete, on the device, too; Gloo: only after `wait`."""


class Lane(Protocol):
    """One end of a queue: tensors arrive in the order in which receives are posted.

    Tensors must be dense and of the size that the peer expects. A send is a rendezvous: it is
    complete once the receiver has received the tensor.
    """

    def send(self, tensor: torch.Tensor) -> LaneWork:
        """Start sending a tensor; the caller must keep it unchanged until the work is complete."""

    def receive(self, tensor: torch.Tensor) -> LaneWork:
        """Start receiving into a tensor."""


class TorchLane(NamedTuple):
    """A lane of a torch process group to the rank at position `peer` of the group.

    Gloo supports tags. NCCL and similar backends do not: all messages between two ranks of a group
    are one lane and are sent in order.
    """

    group: dist.ProcessGroup
    peer: int
    tag: int = 0

    # Calling the group directly takes half the time of torch's `isend` and `irecv`.

    def send(self, tensor: torch.Tensor) -> LaneWork:
        """Start sending a tensor."""
        return self.group.send([tensor], self.peer, self.tag)

    def receive(self, tensor: torch.Tensor) -> LaneWork:
        """Start receiving into a tensor."""
        return self.group.recv([tensor], self.peer, self.tag)
