"""In which precision layers compute: autocast over float32 weights and gradient sums."""

from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final

import torch

from gpipe_hpc.engine.loss_scale import LossScale
from gpipe_hpc.errors import ConfigError

PRECISIONS: Final = MappingProxyType(
    {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def casting(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a block within which forwards compute in `precision`.

    bfloat16, float16: torch's autocast. Weights stay as they are, and so do the sums of their
    gradients; boundaries have whatever dtype the layers give. float32: everything as the layers
    have it.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: unknown, expected one of {', '.join(PRECISIONS)}, got {precision!r}; "
            f"choose one of them"
        )
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def scaling(precision: str) -> LossScale | None:
    """Return the loss scale that a precision needs; None for those with the range of float32."""
    return LossScale() if precision == "float16" else None
