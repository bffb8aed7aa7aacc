"""What devices could compute a second at best, by name: dense matrix products, from data sheets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Peak(NamedTuple):
    """FLOPs a second, in 16 bits (bfloat16 or float16) and in float32 without TF32."""

    bits_16: float
    bits_32: float


# A device is the first whose words all stand in its name. NVIDIA's data sheets, without sparsity.
_PEAKS: Final[Mapping[tuple[str, ...], Peak]] = MappingProxyType(
    {
        ("H100", "PCIe"): Peak(756e12, 51e12),
        ("H100", "NVL"): Peak(835e12, 60e12),
        ("H100",): Peak(989e12, 67e12),
        ("H200", "NVL"): Peak(835e12, 60e12),
        ("H200",): Peak(989e12, 67e12),
        ("A100",): Peak(312e12, 19.5e12),
        ("L40S",): Peak(362e12, 91.6e12),
        ("L4",): Peak(121e12, 30.3e12),
        ("V100",): Peak(125e12, 15.7e12),
        ("T4",): Peak(65e12, 8.1e12),
    }
)


def peak_flops_per_s(device_name: str, precision: str) -> float | None:
    """Return the peak of a device in a precision of `train.precision`; None if it is not known."""
    named = set(device_name.replace("-", " ").split())
    for words, peak in _PEAKS.items():
        if named.issuperset(words):
            return peak.bits_32 if precision == "float32" else peak.bits_16
    return None
