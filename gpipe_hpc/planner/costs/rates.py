"""Speed of a device for each kind of operation: given, or measured in a fraction of a second."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Final

import torch
from torch.nn import functional

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine import casting
from gpipe_hpc.planner.costs.clock import WorkClock
from gpipe_hpc.planner.costs.work import OperationWork, WorkCounter
from gpipe_hpc.units import bytes_text, flops_text


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matrix products, convolutions and attention, and bytes/s of all other operations.

    `moved_bytes` is infinite if unknown; then other operations take no time.
    """

    products: float
    convolutions: float
    attention: float
    moved_bytes: float = inf

    @classmethod
    def alike(cls, flops_per_s: float, bytes_per_s: float | None = None) -> "Rates":
        """Return rates with the same FLOP/s for matrix products, convolutions and attention."""
        return cls(flops_per_s, flops_per_s, flops_per_s, bytes_per_s or inf)

    def seconds(self, work: OperationWork) -> float:
        """Return the seconds that the given FLOPs and bytes take."""
        return (
            work.products / self.products
            + work.convolutions / self.convolutions
            + work.attention / self.attention
            + work.moved_bytes / self.moved_bytes
        )

    def text(self) -> str:
        """Describe the rates as text."""
        described = f"{flops_text(self.products)}/s a rank"
        if len({self.products, self.convolutions, self.attention}) > 1:
            described += (
                f" in matrix products, {flops_text(self.convolutions)}/s in convolutions, "
                f"{flops_text(self.attention)}/s in attention"
            )
        if self.moved_bytes < inf:
            described += f", {bytes_text(self.moved_bytes)}/s read and written by other operations"
        return described


_REPEATS: Final = 5
_LIMIT_S: Final = 0.5  # of each kind
_COPIED: Final = 2**26  # bytes


@dataclass(frozen=True)
class _Probe:
    """Sizes of the operations that are measured, similar to layers that a device can train."""

    rows: int
    width: int
    images: int
    sequences: int
    length: int
    elements: int


_OF_CPUS: Final = _Probe(256, 256, 2, 2, 128, 2**20)
_OF_ACCELERATORS: Final = _Probe(8192, 2048, 64, 16, 1024, 2**26)


def measured_rates(device: Device, precision: str, clock: WorkClock | None = None) -> Rates:
    """Measure the speed of a device for forward and backward of each kind of operation.

    Matrix products: a linear layer that widens by four. Convolutions: 3 x 3 over 64 channels of 28
    x 28 images. Attention: causal, four heads of 64. Others: a GELU, a normalisation and an
    addition. The result is the median of several repetitions without the first. Uses no random
    numbers.
    """
    clock, probe = clock or WorkClock(), _OF_ACCELERATORS if device.is_accelerator else _OF_CPUS
    rates = {}
    for kind, work in _works(device, probe).items():
        with casting(precision, device), torch.enable_grad(), WorkCounter() as counter:
            work()
        amount = getattr(counter.so_far(), kind)
        with casting(precision, device), torch.enable_grad():
            rates[kind] = amount / _median_s(work, device, clock)
    return Rates(**rates)


def host_copy_rate(device: Device, clock: WorkClock | None = None) -> float | None:
    """Measure the bytes/s of copies from an accelerator to pinned host memory.

    Returns None on a CPU.
    """
    if not device.is_accelerator:
        return None
    own = device.to_device(torch.zeros(_COPIED, dtype=torch.uint8))
    host = device.pinned(own.shape, own.dtype)
    return _COPIED / _median_s(lambda: device.copy_to_host(host, own), device, clock or WorkClock())


def _median_s(work: Callable[[], None], device: Device, clock: WorkClock) -> float:
    times: list[float] = []
    began_s = clock.now()
    while len(times) < 2 or (len(times) < _REPEATS and clock.now() - began_s < _LIMIT_S):
        times.append(clock.timed(work, device)[1])
    return median(times[1:])


def _works(device: Device, probe: _Probe) -> Mapping[str, Callable[[], None]]:
    """Return a function to run for each kind of operation, by field of `Rates`."""
    rows, matrix = (
        ramp(device, probe.rows, probe.width),
        ramp(device, 4 * probe.width, probe.width),
    )
    images, kernels = ramp(device, probe.images, 64, 28, 28), ramp(device, 64, 64, 3, 3)
    query, key, value = (ramp(device, probe.sequences, 4, probe.length, 64) for _ in range(3))
    numbers = ramp(device, probe.elements // 1024, 1024)

    def products() -> None:
        _forward_backward(functional.linear(rows, matrix), (rows, matrix))

    def convolutions() -> None:
        _forward_backward(functional.conv2d(images, kernels, padding=1), (images, kernels))

    def attention() -> None:
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        _forward_backward(seen, (query, key, value))

    def moved_bytes() -> None:
        hidden = functional.layer_norm(functional.gelu(numbers), (1024,))
        _forward_backward(numbers + hidden, (numbers,))

    return {
        "products": products,
        "convolutions": convolutions,
        "attention": attention,
        "moved_bytes": moved_bytes,
    }


def _forward_backward(output: torch.Tensor, given: Sequence[torch.Tensor]) -> None:
    torch.autograd.grad(output, given, torch.ones_like(output))


def ramp(device: Device, *shape: int) -> torch.Tensor:
    """Return a leaf tensor of small numbers of both signs, equal on every rank."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.float32).remainder(101).sub(50).div(500)
    return device.to_device(numbers.view(shape)).requires_grad_()
