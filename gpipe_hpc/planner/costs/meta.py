"""Copy or build modules on the meta device: shapes without values."""

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.errors import ModelError, words_of
from gpipe_hpc.models import Layer, LayerSpec, build_abstract, build_layer

META: Final = torch.device("meta")


def meta_layer(layer: Layer, index: int) -> nn.Module:
    """Build a layer on the meta device; an existing module is copied without its values."""
    if isinstance(layer, LayerSpec):
        try:
            return build_abstract(layer, index=index)
        except ModelError:
            # Some factories read tensor values. A single real layer is small enough to build,
            # and a real error is raised again.
            layer = build_layer(layer, index=index, seed=0)
    return meta_copy(layer, f"layers.{index}")


def meta_copies(layers: Sequence[Layer]) -> list[Layer]:
    """Copy modules to the meta device without values; shared parameters stay shared.

    Specs are returned unchanged. Raises ModelError for a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    return [
        layer if isinstance(layer, LayerSpec) else meta_copy(layer, f"layers.{index}", memo)
        for index, layer in enumerate(layers)
    ]


def meta_copy(module: nn.Module, where: str, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module to the meta device; raise ModelError if it cannot be copied.

    `memo`: copies made before, as for `copy.deepcopy`.
    """
    memo = {} if memo is None else memo
    for buffer in module.buffers():
        memo.setdefault(id(buffer), buffer.to(META))
    for parameter in module.parameters():
        empty = nn.Parameter(torch.empty_like(parameter, device=META), parameter.requires_grad)
        memo.setdefault(id(parameter), empty)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ModelError(
            f"{where}: cannot be counted, because copy.deepcopy of the module failed: "
            f"{words_of(error)}; pass a LayerSpec"
        ) from error
