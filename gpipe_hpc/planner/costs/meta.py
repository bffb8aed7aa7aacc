"""Modules on the meta device: shapes without values."""

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.errors import ModelError, words_of
from gpipe_hpc.models import Layer, LayerSpec, build_abstract, build_layer

META: Final = torch.device("meta")


def meta_layer(layer: Layer, index: int) -> nn.Module:
    """Return a layer on the meta device; one that comes built is copied, without its values."""
    if isinstance(layer, LayerSpec):
        try:
            return build_abstract(layer, index=index)
        except ModelError:
            # Some factories read values of tensors. One real layer is still far from the model,
            # and a true fault is raised again.
            layer = build_layer(layer, index=index, seed=0)
    return meta_copy(layer, f"layers.{index}")


def meta_copies(layers: Sequence[Layer]) -> list[Layer]:
    """Return layers without the values of those that come built; what these share is shared still.

    Raises `ModelError` for one that cannot be copied.
    """
    memo: dict[int, Any] = {}
    return [
        layer if isinstance(layer, LayerSpec) else meta_copy(layer, f"layers.{index}", memo)
        for index, layer in enumerate(layers)
    ]


def meta_copy(module: nn.Module, where: str, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a module without its values; raise `ModelError` if it cannot be copied.

    `memo`: copies that were made already, as `copy.deepcopy` has it.
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
            f"{where}: cannot be counted, expected a module that copy.deepcopy copies, got "
            f"{words_of(error)}; give a LayerSpec"
        ) from error
