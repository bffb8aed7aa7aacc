"""Peak FLOP/s of GPUs for dense matrix products, by device name, from data sheets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class PeakFlops(NamedTuple):
    """Peak FLOP/s of a GPU in 16 bits (bfloat16 or float16) and in float32 without TF32."""

    bits_16: float
    bits_32: float


# The first entry whose words all occur in the device name applies. NVIDIA's data sheets, dense.
_PEAKS: Final[Mapping[tuple[str, ...], PeakFlops]] = MappingProxyType(
    {
        ("H100", "PCIe"): PeakFlops(756e12, 51e12),
        ("H100", "NVL"): PeakFlops(835e12, 60e12),
        ("H100",): PeakFlops(989e12, 67e12),
        ("H200", "NVL"): PeakFlops(835e12, 60e12),
        ("H200",): PeakFlops(989e12, 67e12),
        ("A100",): PeakFlops(312e12, 19.5e12),
        ("L40S",): PeakFlops(362e12, 91.6e12),
        ("L4",): PeakFlops(121e12, 30.3e12),
        ("V100",): PeakFlops(125e12, 15.7e12),
        ("T4",): PeakFlops(65e12, 8.1e12),
    }
)


def peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device for a value of `train.precision`, or None if unknown."""
    named = set(device_name.replace("-", " ").split())
    for words, peak in _PEAKS.items():
        if named.issuperset(words):
            return peak.bits_32 if precision == "float32" else peak.bits_16
    return None
