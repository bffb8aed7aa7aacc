"""Passing of tensors between ranks that share memory, ordered by device events.

On an accelerator the computation of the tensors may be unfinished when they are passed on, and they
may be in use when they are deleted. Streams wait for each other; the host never blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpipe_hpc.device.device import Device, Event


class Left(NamedTuple):
    """Tensors and a value for another rank; the event `ready` ends the work on the tensors."""

    tensors: Sequence[Tensor]
    ready: Event
    value: Any = None


def leave(device: Device, tensors: Sequence[Tensor], value: Any = None) -> Left:
    """Return tensors and a value in the form in which another rank of this process can `take` them.

    The calling rank must not modify the tensors any more.
    """
    return Left(tensors, device.current_stream().record_event(), value)


def take(device: Device, left: Left) -> Sequence[Tensor]:
    """Return the tensors that another rank has passed on, for use on this rank's current stream."""
    stream = device.current_stream()
    stream.wait_event(left.ready)
    for tensor in left.tensors:
        if device.holds(tensor):
            device.lend(tensor, stream)
    return left.tensors
