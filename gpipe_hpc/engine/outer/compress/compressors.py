"""The compressors by name, and for which gradients each is."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from gpipe_hpc.engine.outer.compress.bfloat16 import BFloat16
from gpipe_hpc.engine.outer.compress.coded import Coded
from gpipe_hpc.engine.outer.compress.compressor import Compressor
from gpipe_hpc.engine.outer.compress.float16 import Float16
from gpipe_hpc.engine.outer.compress.powersgd import PowerSGD
from gpipe_hpc.engine.outer.compress.qsgd import QSGD
from gpipe_hpc.engine.outer.compress.topk import TopK
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.errors import ModelError

_MAKERS: Final[Mapping[str, Callable[[Outer], Compressor]]] = MappingProxyType(
    {
        "bfloat16": lambda outer: Coded(BFloat16()),
        "float16": lambda outer: Coded(Float16()),
        "powersgd": lambda outer: PowerSGD(outer.powersgd_rank),
        "topk": lambda outer: TopK(outer.topk_fraction),
        "qsgd": lambda outer: Coded(QSGD(outer.qsgd_levels)),
    }
)


def make_compressor(outer: Outer) -> Compressor:
    """Return the compressor that the settings name."""
    return _MAKERS[outer.compress](outer)


def check_fits(compress: str, name: str, dtype: torch.dtype) -> None:
    """Raise ModelError for a parameter whose gradient the compressor is not for."""
    if compress == "none":
        return
    kind = str(dtype).removeprefix("torch.")
    if not dtype.is_floating_point:
        raise ModelError(
            f"outer.compress: {compress} is for real numbers, expected {name} to be of float32, "
            f"got {kind}; use outer.compress=none"
        )
    if compress in ("bfloat16", "float16") and dtype.itemsize <= 2:
        raise ModelError(
            f"outer.compress: {compress} makes 16 bits of 32, expected {name} to be of float32 or "
            f"float64, got {kind}, of which nothing would be saved; use outer.compress=none, qsgd, "
            f"powersgd or topk"
        )
