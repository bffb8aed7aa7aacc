"""A lane: a queue of tensors between two ranks, whatever carries it."""

from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A send or a receive under way."""

    def wait(self) -> object:
        """Return when it is done; over a device's own backend, order the current stream behind it.

        Raises RuntimeError if it failed.
        """

    def is_completed(self) -> bool:
        """Say whether it is done, also on the device; Gloo says so only to who waits."""


class Lane(Protocol):
    """One end of a queue: what one rank sends there comes in the order of the other's receives.

    A tensor has no gaps in its memory, and the bytes that the other end expects. A send is a
    rendezvous: it is done once the receiver has taken it.
    """

    def send(self, tensor: torch.Tensor) -> Work:
        """Start sending a tensor; the caller keeps it, unchanged, until the work is done."""

    def receive(self, tensor: torch.Tensor) -> Work:
        """Start receiving into a tensor."""


class TorchLane(NamedTuple):
    """A lane of a torch process group; `peer` is the other rank's position in it.

    Gloo keeps tags apart. NCCL and its kin know none: all that goes between two ranks in a group
    is one lane, and goes one after the other.
    """

    group: dist.ProcessGroup
    peer: int
    tag: int = 0

    # The group's own calls take half the time of torch's `isend` and `irecv` around them.

    def send(self, tensor: torch.Tensor) -> Work:
        """Start sending."""
        return self.group.send([tensor], self.peer, self.tag)

    def receive(self, tensor: torch.Tensor) -> Work:
        """Start receiving."""
        return self.group.recv([tensor], self.peer, self.tag)
