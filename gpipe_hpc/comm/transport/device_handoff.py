"""Passing of tensors between ranks that share memory, ordered by device events.

On an accelerator the computation of the tensors may be unfinished when they are passed on, and they
may be in use when they are deleted. Streams wait for each other; the host never blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gpipe_hpc.device.device import Device, Event


class DeviceHandoff(NamedTuple):
    """Tensors and a value for another rank; the event `ready` ends the work on the tensors."""

    tensors: Sequence[Tensor]
    ready: Event
    value: Any = None


def hand_off(device: Device, tensors: Sequence[Tensor], value: Any = None) -> DeviceHandoff:
    """Return tensors and a value in a form that another rank can pass to `accept_handoff`.

    The calling rank must not modify the tensors any more.
    """
    return DeviceHandoff(tensors, device.current_stream().record_event(), value)


def accept_handoff(device: Device, left: DeviceHandoff) -> Sequence[Tensor]:
    """Return the tensors that another rank has passed on, for use on this rank's current stream."""
    stream = device.current_stream()
    stream.wait_event(left.ready)
    for tensor in left.tensors:
        if device.holds(tensor):
            device.keep_for_stream(tensor, stream)
    return left.tensors
