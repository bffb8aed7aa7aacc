"""Count parameters of models of any size without allocating them."""

from collections.abc import Sequence

import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.building import build_layer
from gpipe_hpc.models.layers import Layer


def count_parameters(layers: Sequence[Layer]) -> int:
    """Return the number of parameters of the whole model; a parameter in two layers counts once."""
    return sum(layer_parameters(layers))


def layer_parameters(layers: Sequence[Layer]) -> list[int]:
    """Return the number of parameters of each layer, in order.

    A `LayerSpec` is built on the meta device, one layer at a time. A parameter shared by several
    layers counts for the first of them. Buffers are no parameters. Raises `ModelError` when a
    layer cannot be built.
    """
    # Keyed by object and kept: an id alone may be used again once its parameter is gone.
    seen: dict[int, nn.Parameter] = {}
    counts: list[int] = []
    for index, layer in enumerate(layers):
        fresh = [p for p in _abstract(layer, index).parameters() if id(p) not in seen]
        seen.update((id(p), p) for p in fresh)
        counts.append(sum(p.numel() for p in fresh))
    return counts


def _abstract(layer: Layer, index: int) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer
    try:
        return build_layer(layer, index=index, seed=0, device="meta")
    except ModelError:
        # Some factories read values of tensors (`.item()`), which meta tensors have not. One real
        # layer at a time is still far from the whole model, and a true fault is raised again.
        return build_layer(layer, index=index, seed=0, device=torch.device("cpu"))
