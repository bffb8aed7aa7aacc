"""Numbers of a device on their way to the host, which waits for them when it reads them."""

from typing import NamedTuple

import torch

from gpipe_hpc.device.device import Device, Event


class Fetched(NamedTuple):
    """Values in the host's memory, which are there once `event` is done; None: they are.

    The copy is under way at once, so who reads it later waits for no more than came before it.
    """

    values: torch.Tensor
    event: Event | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, device: Device) -> "Fetched":
        """Return what a tensor holds at the present end of the current stream."""
        if not (device.is_accelerator and device.holds(tensor)):
            return cls(tensor)
        values = device.pinned(tensor.shape, tensor.dtype)
        device.fetch_into(values, tensor)
        event = device.event()
        event.record()
        return cls(values, event)

    def part(self, where: slice) -> "Fetched":
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
