"""Times and values of a device that are read later, so that a step does not wait for them."""

import time
from typing import NamedTuple

import torch

from gpipe_hpc.device.device import Device, Event

Mark = float | Event
"""A moment: seconds of this host's clock, or an event on an accelerator's stream."""


def take_mark(device: Device) -> Mark:
    """Return the present: on a CPU `time.perf_counter()`, one clock for all processes of a host.

    On an accelerator an event on the current stream: taking it does not wait for the device,
    reading does.
    """
    if not device.is_accelerator:
        return time.perf_counter()
    mark = device.event(timing=True)
    mark.record()
    return mark


def await_mark(mark: Event) -> None:
    """Let the host wait for a mark, unless it is done."""
    if not mark.query():
        mark.synchronize()


def wait_for(mark: Mark) -> None:
    """Let the host wait for a mark, unless it is done."""
    if not isinstance(mark, float):
        await_mark(mark)


def seconds_between(first: Mark, second: Mark) -> float:
    """Return the seconds from a mark to a later one of the same device."""
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    assert not isinstance(first, float) and not isinstance(second, float), "marks of two kinds"
    await_mark(second)
    return first.elapsed_ms(second) / 1e3


class AsyncHostCopy(NamedTuple):
    """Values in the host's memory, which are there once `event` is done; None: they are.

    The copy is under way at once, so who reads it later waits for no more than came before it.
    """

    values: torch.Tensor
    event: Event | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, device: Device) -> "AsyncHostCopy":
        """Return what a tensor holds at the present end of the current stream."""
        if not (device.is_accelerator and device.holds(tensor)):
            return cls(tensor)
        values = device.pinned(tensor.shape, tensor.dtype)
        device.fetch_into(values, tensor)
        event = device.event()
        event.record()
        return cls(values, event)

    def part(self, where: slice) -> "AsyncHostCopy":
        """Return some of the values."""
        return self._replace(values=self.values[where])

    def poll(self) -> torch.Tensor | None:
        """Return the values if they have come, without waiting."""
        return self.values if self.event is None or self.event.query() else None

    def read(self) -> torch.Tensor:
        """Return the values, a tensor of the host."""
        if self.event is not None and not self.event.query():
            self.event.synchronize()
        return self.values
