"""Count the parameters of models of any size, without allocating memory for them."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.building import build_abstract, build_layer, refuse_lazy
from gpipe_hpc.models.layers import Layer, LayerSpec, global_name, named_layer_parameters
from gpipe_hpc.models.ties import find_ties, first_names, parameter_at


def count_parameters(layers: Sequence[Layer]) -> int:
    """Return the number of parameters of the model; a parameter shared by layers counts once."""
    return sum(layer_parameters(layers))


def layer_parameters(layers: Sequence[Layer]) -> list[int]:
    """Return the number of parameters of each layer, in order.

    A `LayerSpec` is built on the meta device, one layer at a time. A parameter shared by several
    layers counts for the first of them; buffers do not count. Raises `ModelError` if a layer cannot
    be built.
    """
    return [sum(p.numel() for p in owned.values()) for owned in _owned_parameters(layers)]


def parameter_sizes(layers: Sequence[Layer]) -> dict[str, int]:
    """Return the number of elements of every parameter of the model, by global name.

    Builds and counts layers as `layer_parameters` does.
    """
    return {name: p.numel() for owned in _owned_parameters(layers) for name, p in owned.items()}


def sizes_of_layers(layers: Sequence[Layer]) -> list[dict[str, tuple[int, torch.dtype]]]:
    """Return the number of elements and dtype of each layer's parameters, by global name.

    Builds and counts layers as `layer_parameters` does.
    """
    return [
        {name: (p.numel(), p.dtype) for name, p in owned.items()}
        for owned in _owned_parameters(layers)
    ]


def _owned_parameters(layers: Sequence[Layer]) -> Iterator[dict[str, nn.Parameter]]:
    """Yield each layer's parameters by name, without those that an earlier layer shares."""
    ties = {global_name(*place): tie for tie in find_ties(layers) for place in tie.places}
    shapes: dict[str, torch.Size] = {}
    for index, layer in enumerate(layers):
        built = _abstract(layer, index)
        for name in dict(layer.ties) if isinstance(layer, LayerSpec) else ():
            tied = parameter_at(built, name, f"layers.{index}")
            tie = ties.get(global_name(index, first_names(built)[name]))
            if tie is None:
                continue  # both names of the tie belong to one parameter of one layer
            first = shapes.setdefault(tie.name, tied.shape)
            if first != tied.shape:
                raise ModelError(
                    f"layers.{index}: {name} cannot be tied to {tie.name}, expected shape "
                    f"{tuple(first)}, got {tuple(tied.shape)}; tie parameters of equal shape"
                )
        named = dict(named_layer_parameters(index, built))
        yield {n: p for n, p in named.items() if n not in ties or ties[n].name == n}


def _abstract(layer: Layer, index: int) -> nn.Module:
    if isinstance(layer, nn.Module):
        refuse_lazy(layer, f"layers.{index}")
        return layer
    try:
        return build_abstract(layer, index=index)
    except ModelError:
        # Some factories read tensor values (`.item()`), which meta tensors do not have. Building
        # one real layer at a time needs little memory, and other errors are raised again.
        return build_layer(layer, index=index, seed=0)
