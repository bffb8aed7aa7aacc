"""Peaks by the names that torch gives devices."""

import pytest

from gpipe_hpc.planner.costs.device_peaks import peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA H200", "float32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("Tesla T4", "float32", 8.1e12),
        ("NVIDIA T400", "float32", None),
        ("NVIDIA L40", "bfloat16", None),
        ("cpu", "float32", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name, precision, peak):
    assert peak_flops_per_s(name, precision) == peak
