"""Tied weights: one parameter in several layers, wherever these are placed."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import Layer, LayerSpec
from gpipe_hpc.models.naming import global_name


@dataclass(frozen=True)
class Tie:
    """The places of one parameter: (layer index, name within the layer), ascending."""

    places: tuple[tuple[int, str], ...]

    @property
    def name(self) -> str:
        """Return the parameter's global name: that of its first place."""
        return global_name(*self.places[0])


def find_ties(layers: Sequence[Layer]) -> list[Tie]:
    """Return the ties of a model, in the order of their first places.

    Layers are tied by `LayerSpec.tied`, or by sharing a parameter if they come built. Raises
    `ModelError` for a tie with one place.
    """
    places: dict[str, list[tuple[int, str]]] = {}
    shared: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, LayerSpec):
            for name, label in layer.ties:
                places.setdefault(label, []).append((index, name))
        else:
            for name, parameter in layer.named_parameters():
                shared.setdefault(id(parameter), []).append((index, name))
    for label, found in places.items():
        if len(found) == 1:
            raise ModelError(
                f"layers.{found[0][0]}: tie {label!r} has one place, expected two or more, got "
                f"{global_name(*found[0])} alone; tie another layer to it, or none"
            )
    groups = [*places.values(), *shared.values()]
    ties = [Tie(tuple(found)) for found in groups if len(found) > 1]
    return sorted(ties, key=lambda tie: tie.places)


def parameter_at(layer: nn.Module, name: str, where: str) -> nn.Parameter:
    """Return a layer's parameter by its name; `ModelError` if it has none of that name."""
    named = dict(layer.named_parameters(remove_duplicate=False))
    if name not in named:
        raise ModelError(
            f"{where}: no parameter {name!r} to tie, expected one of "
            f"{', '.join(named) or 'none: it has no parameters'}; correct LayerSpec.tied"
        )
    return named[name]


def replace_parameter(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put another parameter in the place of `name`."""
    owner, _, leaf = name.rpartition(".")
    setattr(layer.get_submodule(owner), leaf, parameter)
