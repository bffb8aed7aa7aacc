"""The memory of a rank at the moment when an action fails because memory is exhausted."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import DeviceMemoryError


class MemorySnapshot(NamedTuple):
    """Memory use of a rank in bytes; None if the system does not report a number.

    Args:
        allocated: see `Device.memory_allocated`.
        peak: see `Device.memory_peak`.
        reserved: memory reserved by torch's allocator.
        total: capacity of the device.
        free: memory of the device that can still be allocated.
        weights: parameters and buffers.
        num_kept: number of micro-batches whose activations are stored.
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
        """Measure the memory of a device that holds these layers."""
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
    """Raised if an action runs out of memory; `snapshot` is the memory use at that moment."""

    def __init__(self, text: str, snapshot: MemorySnapshot) -> None:
        super().__init__(text)
        self.snapshot = snapshot
