"""Run through the layers of a model in order, giving each the outputs of earlier layers."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from gpipe_hpc.models import Layer, LayerSpec, SkipNames, find_skips, layer_name, skip_names
from gpipe_hpc.pytree import flatten

T = TypeVar("T")


class LayerInput(NamedTuple):
    """Inputs of a layer: a nested value, and the values of skip connections that end there."""

    value: Any
    popped: tuple[Any, ...] = ()


@dataclass(frozen=True)
class LayerVisit:
    """A layer with its index and inputs, as passed to the `visit` function of `walk`."""

    layer: Layer
    index: int
    names: SkipNames
    given: LayerInput

    @property
    def where(self) -> str:
        """Return the layer's name for messages, such as ``layers.3 (Linear)``."""
        return f"layers.{self.index} ({layer_name(self.layer)})"


@dataclass(frozen=True)
class VisitResult(Generic[T]):
    """Result of visiting a layer, with its output and stashed values for later layers."""

    found: T
    output: Any
    stashed: Sequence[Any] = ()


def walk(
    layers: Sequence[Layer],
    inputs: Any,
    visit: Callable[[LayerVisit], VisitResult[T]],
    *,
    alone: Collection[int] = (),
) -> tuple[list[T], Any]:
    """Call `visit` for each layer with the outputs of earlier ones; return results and last output.

    Equal specs with inputs of equal structure are visited once, except the indices in `alone`.
    Raises ModelError for invalid skip connections.
    """
    find_skips(layers)  # raises ModelError for invalid skip connections
    value, stashed = inputs, dict[str, Any]()
    known: dict[Hashable, list[tuple[LayerSpec, VisitResult[T]]]] = {}
    found: list[T] = []
    for index, layer in enumerate(layers):
        names = skip_names(layer)
        given = LayerInput(value, tuple(stashed.pop(name) for name in names.pops))
        alike: list[tuple[LayerSpec, VisitResult[T]]] = []
        if index not in alone:
            alike = known.setdefault((structure(given), len(names.stashes)), alike)
        passed = next((passed for spec, passed in alike if spec == layer), None)
        if passed is None:
            passed = visit(LayerVisit(layer, index, names, given))
            if isinstance(layer, LayerSpec):
                alike.append((layer, passed))
        value = passed.output
        stashed.update(zip(names.stashes, passed.stashed, strict=True))
        found.append(passed.found)
    return found, value


def structure(nest: Any) -> Hashable:
    """Return a hashable key of a nested value, from its tensors' shapes, strides and dtypes."""
    leaves, tree = flatten(nest)
    described = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return tree, described


def described(nest: Any) -> str:
    """Describe a nested value for messages: dtypes and shapes of tensors, types of others."""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in flatten(nest)[0]
    )
