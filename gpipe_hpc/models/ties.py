"""Tied weights: one parameter used in several layers, on any stages."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.building import build_abstract, build_layer
from gpipe_hpc.models.layers import Layer, LayerSpec, global_name


@dataclass(frozen=True)
class Tie:
    """All occurrences of one parameter: (layer index, name within the layer), ascending."""

    places: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        """Return the parameter's global name, that of its first occurrence."""
        return global_name(*self.places[0])


def find_ties(layers: Sequence[Layer]) -> list[Tie]:
    """Return the ties of a model, sorted by their first occurrences.

    Layers are tied by `LayerSpec.tied` or, if built, by sharing a parameter. If a layer has several
    names for a parameter, the first is used.

    Raises:
        ModelError: a tie has only one occurrence, or a parameter belongs to two ties.
    """
    places: dict[str, list[tuple[int, str]]] = {}
    label_of: dict[tuple[int, str], str] = {}
    shared: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, LayerSpec):
            first = _first_names_of(layer, index) if layer.ties else {}
            for name, label in layer.ties:
                place = index, first.get(name, name)
                if label_of.setdefault(place, label) != label:
                    raise ModelError(
                        f"layers.{index}: {place[1]} is tied as {label_of[place]!r} and, under its "
                        f"other name {name}, as {label!r}; use one label for a parameter"
                    )
                places.setdefault(label, []).append(place)
        else:
            for name, parameter in layer.named_parameters():
                shared.setdefault(id(parameter), []).append((index, name))
    for label, found in places.items():
        if len(found) == 1:
            raise ModelError(
                f"layers.{found[0][0]}: the tie {label!r} has only one parameter, "
                f"{global_name(*found[0])}; tie another layer to it, or remove the tie"
            )
    groups = [list(dict.fromkeys(found)) for found in (*places.values(), *shared.values())]
    ties = [Tie(tuple(found)) for found in groups if len(found) > 1]
    return sorted(ties, key=lambda tie: tie.places)


def parameter_at(layer: nn.Module, name: str, where: str) -> nn.Parameter:
    """Return a layer's parameter by name; raise `ModelError` if there is none."""
    named = dict(layer.named_parameters(remove_duplicate=False))
    if name not in named:
        raise ModelError(
            f"{where}: no parameter {name!r} to tie, expected one of "
            f"{', '.join(named) or 'none: it has no parameters'}; correct LayerSpec.tied"
        )
    return named[name]


def replace_parameter(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the parameter `name` of a layer under all names that it has there."""
    first = first_names(layer)
    for each in [other for other, same in first.items() if same == first[name]]:
        owner, _, leaf = each.rpartition(".")
        setattr(layer.get_submodule(owner), leaf, parameter)


def first_names(layer: nn.Module) -> dict[str, str]:
    """Map all names of a layer's parameters to the first name of each."""
    first: dict[int, str] = {}
    named = layer.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _first_names_of(layer: LayerSpec, index: int) -> dict[str, str]:
    """Return `first_names` of an unbuilt layer, or an empty dict if the layer cannot be built."""
    with suppress(ModelError):
        return first_names(build_abstract(layer, index=index))
    with suppress(ModelError):  # some factories read values
        return first_names(build_layer(layer, index=index, seed=0))
    return {}  # the error is raised when the layer is built
