"""In which precision layers compute: autocast over float32 weights and gradient sums."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Final

import torch

from gpipe_hpc.engine.loss_scale import LossScale
from gpipe_hpc.errors import ConfigError

PRECISIONS: Final = MappingProxyType(
    {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

_AS_IT_IS: Final = nullcontext()


def casting(
    precision: str, device: torch.device, *, shared: bool = True
) -> AbstractContextManager[object]:
    """Return a block within which forwards compute in `precision`.

    bfloat16, float16: torch's autocast. Weights stay as they are, and so do the sums of their
    gradients; boundaries have whatever dtype the layers give. float32: everything as the layers
    have it. `shared`: whether casts of parameters may be those of other such blocks.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision: unknown, expected one of {', '.join(PRECISIONS)}, got {precision!r}; "
            f"choose one of them"
        )
    dtype = PRECISIONS[precision]
    if dtype is None:
        return _AS_IT_IS
    return torch.autocast(device.type, dtype, cache_enabled=shared)


def keeping_casts(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a block within which all `casting` blocks share their casts of parameters.

    For one step: a weight is cast once for all micro-batches, not once for each, and their graphs
    hold one copy of it. Parameters must not change within the block.
    """
    if PRECISIONS[precision] is None or not _casts_keep_their_graph():
        return nullcontext()
    # torch forgets casts at the end of the outermost block, also of one that casts nothing. There
    # may be one around many steps, with casts of weights that have changed since.
    torch.clear_autocast_cache()
    return torch.autocast(device.type, enabled=False)


@cache
def _casts_keep_their_graph() -> bool:
    """Say whether a cast first made without a graph serves a forward with one.

    Older versions of torch hand out the same detached cast: the weight would get no gradient.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    x = torch.ones(1, 1)
    casts = torch.autocast("cpu", torch.bfloat16)
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        with torch.no_grad(), casts:
            torch.mm(x, weight)
        with torch.enable_grad(), casts:
            return torch.mm(x, weight).requires_grad


def scaling(precision: str) -> LossScale | None:
    """Return the loss scale that a precision needs; None for those with the range of float32."""
    return LossScale() if precision == "float16" else None
