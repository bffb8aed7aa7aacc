"""Times and values of a device that are read later, so that a step does not wait for them."""

import time
from typing import NamedTuple

import torch

from gpipe_hpc.device.device import Device, Event

Mark = float | Event
"""A point in time: seconds of this host's clock, or an event on an accelerator's stream."""


def record_mark(device: Device) -> Mark:
    """Return the current time: `time.perf_counter()` on a CPU, an event on an accelerator.

    The clock is the same for all processes of a host. The event is recorded on the current stream;
    only reading it waits for the device.
    """
    if not device.is_accelerator:
        return time.perf_counter()
    mark = device.event(timing=True)
    mark.record()
    return mark


def wait_for_mark(mark: Event) -> None:
    """Block the host until an event is complete."""
    if not mark.query():
        mark.synchronize()


def wait_for(mark: Mark) -> None:
    """Block the host until a mark of `record_mark` is reached; returns at once for a CPU time."""
    if not isinstance(mark, float):
        wait_for_mark(mark)


def seconds_between(first: Mark, second: Mark) -> float:
    """Return the seconds between two points in time of the same device."""
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    assert not isinstance(first, float) and not isinstance(second, float), (
        "one time is of the host's clock and the other an event of a device"
    )
    wait_for_mark(second)
    return first.elapsed_ms(second) / 1e3


class AsyncHostTensor(NamedTuple):
    """A copy of a tensor in host memory, valid once `event` is complete, or at once if it is None.

    The copy starts when the object is created, so reading it later does not wait for work queued
    afterwards.
    """

    values: torch.Tensor
    event: Event | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, device: Device) -> "AsyncHostTensor":
        """Start copying a tensor to the host, after the work now queued on the current stream."""
        if not (device.is_accelerator and device.holds(tensor)):
            return cls(tensor)
        values = device.pinned(tensor.shape, tensor.dtype)
        device.copy_to_host(values, tensor)
        event = device.event()
        event.record()
        return cls(values, event)

    def part(self, where: slice) -> "AsyncHostTensor":
        """Return the copy of the values in a slice."""
        return self._replace(values=self.values[where])

    def poll(self) -> torch.Tensor | None:
        """Return the values if the copy is complete, else None; does not block."""
        return self.values if self.event is None or self.event.query() else None

    def read(self) -> torch.Tensor:
        """Block until the copy is complete and return the values, a host tensor."""
        if self.event is not None and not self.event.query():
            self.event.synchronize()
        return self.values
