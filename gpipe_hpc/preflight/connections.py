"""Connections between two ranks as the run uses them: stage channels, or a process group."""

from collections.abc import Callable
from typing import Final, Protocol

import torch

from gpipe_hpc.comm.collectives.group import Group, PeerTensor
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.device.device import Device

_LANE: Final = "preflight"


class PairConnection(Protocol):
    """Interface of a connection to another rank; both ends must use it in the same order."""

    def send(self, message: torch.Tensor) -> None:
        """Send a message, given as a flat contiguous tensor."""

    def expect(self, num_elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Post a receive; return a function that waits for the message and returns it."""


class ChannelConnection:
    """Connection over two channels of stage boundaries, for example in shared memory."""

    def __init__(self, transport: Transport, out: PlacedChannel, into: PlacedChannel) -> None:
        self._transport, self._out, self._into = transport, out, into

    def send(self, message: torch.Tensor) -> None:
        """Send the message as the boundary tensor of a micro-batch."""
        place = _place(message.numel(), message.dtype)
        self._transport.send(self._out, _LANE, place, message, 1)

    def expect(self, num_elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Post the receive buffers of a message; return a function that waits for it."""
        place = _place(num_elements, dtype)
        self._transport.post(self._into, _LANE, place)

        def wait() -> torch.Tensor:
            received = self._transport.wait(self._into, _LANE, place).nest
            assert isinstance(received, torch.Tensor), f"{self._into}: a message is one tensor"
            return received

        return wait


def _place(num_elements: int, dtype: torch.dtype) -> int:
    """Return a micro-batch index derived from the message size.

    Repeated messages of one size then need no header.
    """
    return 0 if dtype == torch.int64 else num_elements.bit_length()


class GroupConnection:
    """Connection of two ranks in a process group for gradient all-reduces."""

    def __init__(self, group: Group, peer: int, device: Device) -> None:
        self._group, self._peer, self._device = group, peer, device

    def send(self, message: torch.Tensor) -> None:
        """Send the message over the group's connection."""
        self._group.start_exchange([PeerTensor(self._peer, message)], ()).wait()

    def expect(self, num_elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Return a function that receives the message.

        No receive is posted before that call: with NCCL, a posted receive would block what this
        rank sends first.
        """

        def wait() -> torch.Tensor:
            message = self._device.empty((num_elements,), dtype)
            self._group.start_exchange((), [PeerTensor(self._peer, message)]).wait()
            return message

        return wait
