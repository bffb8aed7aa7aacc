"""Tensors that a rank leaves for another one in the memory that both share.

On an accelerator what makes a tensor may still be under way when it is left, and what uses it when
it is let go of: streams wait for each other, hosts for neither.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpipe_hpc.device.device import Device, Event


class Left(NamedTuple):
    """Tensors for another rank, and a value; `ready` is a mark behind all that makes them."""

    tensors: Sequence[Tensor]
    ready: Event
    value: Any = None


def leave(device: Device, tensors: Sequence[Tensor], value: Any = None) -> Left:
    """Leave tensors, which this rank does not write to any more, and a value."""
    return Left(tensors, device.current_stream().record_event(), value)


def take(device: Device, left: Left) -> Sequence[Tensor]:
    """Return tensors that another rank has left, for use on this rank's current stream."""
    stream = device.current_stream()
    stream.wait_event(left.ready)
    for tensor in left.tensors:
        if device.holds(tensor):
            device.lend(tensor, stream)
    return left.tensors
