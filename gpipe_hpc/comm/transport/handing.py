"""Hand-over of tensors between ranks that share memory, ordered by device events.

On an accelerator the tensors may still be in computation when they are handed over, and in use when
they are deleted. Streams wait for each other; the host never blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpipe_hpc.device.device import Device, Event


class Left(NamedTuple):
    """Tensors and a value for another rank; `ready` marks the end of the work on the tensors."""

    tensors: Sequence[Tensor]
    ready: Event
    value: Any = None


def leave(device: Device, tensors: Sequence[Tensor], value: Any = None) -> Left:
    """Hand over tensors, which this rank must not modify any more, and a value."""
    return Left(tensors, device.current_stream().record_event(), value)


def take(device: Device, left: Left) -> Sequence[Tensor]:
    """Return tensors handed over by another rank, for use on this rank's current stream."""
    stream = device.current_stream()
    stream.wait_event(left.ready)
    for tensor in left.tensors:
        if device.holds(tensor):
            device.lend(tensor, stream)
    return left.tensors
