"""What two ranks time is the run's own way from one to the other: channels, or a group."""

from collections.abc import Callable
from typing import Final, Protocol

import torch

from gpipe_hpc.comm.collectives.group import Group, Piece
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.device.device import Device

_LANE: Final = "preflight"


class Line(Protocol):
    """A way from this rank to another and back; both ends expect the same, in one order."""

    def send(self, message: torch.Tensor) -> None:
        """Send a message, flat and contiguous."""

    def expect(self, num_elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Let a message come; return what waits for it."""


class ChannelLine:
    """Two channels of a pipeline, as its boundaries take them: in shared memory, say."""

    def __init__(self, transport: Transport, out: PlacedChannel, into: PlacedChannel) -> None:
        self._transport, self._out, self._into = transport, out, into

    def send(self, message: torch.Tensor) -> None:
        """Send it as the boundary of a micro-batch."""
        place = _place(message.numel(), message.dtype)
        self._transport.send(self._out, _LANE, place, message, 1)

    def expect(self, num_elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Post its buffers."""
        place = _place(num_elements, dtype)
        self._transport.post(self._into, _LANE, place)

        def wait() -> torch.Tensor:
            came = self._transport.wait(self._into, _LANE, place).nest
            assert isinstance(came, torch.Tensor), f"{self._into}: a message is one tensor"
            return came

        return wait


def _place(num_elements: int, dtype: torch.dtype) -> int:
    """Return a micro-batch for each size: what is expected of one comes without a header."""
    return 0 if dtype == torch.int64 else num_elements.bit_length()


class GroupLine:
    """The connection of two ranks in a group over which gradients are summed."""

    def __init__(self, group: Group, peer: int, device: Device) -> None:
        self._group, self._peer, self._device = group, peer, device

    def send(self, message: torch.Tensor) -> None:
        """Send it over the group's own connection."""
        self._group.start_exchange([Piece(self._peer, message)], ()).wait()

    def expect(self, num_elements: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Post nothing yet: NCCL would keep back behind it what this rank sends first."""

        def wait() -> torch.Tensor:
            message = self._device.empty((num_elements,), dtype)
            self._group.start_exchange((), [Piece(self._peer, message)]).wait()
            return message

        return wait
