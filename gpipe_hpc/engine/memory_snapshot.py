"""How the memory of a rank stands: taken where an action found none left."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import DeviceMemoryError


class MemorySnapshot(NamedTuple):
    """What lies in a rank's memory, in bytes; None where the system does not tell.

    `allocated`, `peak`: as `Device.memory_allocated` and `memory_peak` count. `reserved`: what
    torch holds for more. `total`, `free`: of the device. `weights`: parameters and buffers.
    `num_kept`: micro-batches of which something is kept.
    """

    device: str
    is_accelerator: bool
    allocated: int
    peak: int
    reserved: int
    total: int | None
    free: int | None
    weights: int
    gradients: int
    num_kept: int

    @classmethod
    def of(cls, device: Device, layers: Iterable[nn.Module], num_kept: int) -> "MemorySnapshot":
        """Return how it stands now, on a device that computes these layers."""
        modules = list(layers)
        parameters = {id(p): p for layer in modules for p in layer.parameters()}.values()
        buffers = {id(b): b for layer in modules for b in layer.buffers()}.values()
        return cls(
            f"{device.torch} ({device.name})" if device.is_accelerator else "the host",
            device.is_accelerator,
            device.memory_allocated(),
            device.memory_peak(),
            device.memory_reserved(),
            device.memory_total(),
            device.memory_free(),
            sum(tensor.nbytes for tensor in (*parameters, *buffers)),
            sum(p.grad.nbytes for p in parameters if p.grad is not None),
            num_kept,
        )


class OutOfMemoryError(DeviceMemoryError):
    """An action found no memory; `standing`: how it was there and then."""

    def __init__(self, text: str, standing: MemorySnapshot) -> None:
        super().__init__(text)
        self.standing = standing
