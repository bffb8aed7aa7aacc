"""Traverse the layers of a model in order, passing each its inputs."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from gpipe_hpc.models import Layer, LayerSpec, SkipNames, find_skips, layer_name, skip_names
from gpipe_hpc.pytree import flatten

T = TypeVar("T")


class Given(NamedTuple):
    """Input of a layer: a nested value, and one for each skip connection that ends at the layer."""

    value: Any
    popped: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Visit:
    """A layer with its inputs."""

    layer: Layer
    index: int
    names: SkipNames
    given: Given

    @property
    def where(self) -> str:
        """Return the layer's name for messages."""
        return f"layers.{self.index} ({layer_name(self.layer)})"


@dataclass(frozen=True)
class Passed(Generic[T]):
    """The result of visiting a layer, and its output and stashes for later layers."""

    found: T
    output: Any
    stashed: Sequence[Any] = ()


def walk(
    layers: Sequence[Layer],
    inputs: Any,
    visit: Callable[[Visit], Passed[T]],
    *,
    alone: Collection[int] = (),
) -> tuple[list[T], Any]:
    """Visit the layers in order with the outputs of earlier ones; return results and last output.

    Equal specs with inputs of equal structure are visited once, except the indices in `alone`.
    Raises ModelError for invalid skip connections.
    """
    find_skips(layers)  # raises ModelError for invalid skip connections
    value, stashed = inputs, dict[str, Any]()
    known: dict[Hashable, list[tuple[LayerSpec, Passed[T]]]] = {}
    found: list[T] = []
    for index, layer in enumerate(layers):
        names = skip_names(layer)
        given = Given(value, tuple(stashed.pop(name) for name in names.pops))
        alike: list[tuple[LayerSpec, Passed[T]]] = []
        if index not in alone:
            alike = known.setdefault((structure(given), len(names.stashes)), alike)
        passed = next((passed for spec, passed in alike if spec == layer), None)
        if passed is None:
            passed = visit(Visit(layer, index, names, given))
            if isinstance(layer, LayerSpec):
                alike.append((layer, passed))
        value = passed.output
        stashed.update(zip(names.stashes, passed.stashed, strict=True))
        found.append(passed.found)
    return found, value


def structure(nest: Any) -> Hashable:
    """Return a hashable key of shapes and types, which decide the cost of running on a value."""
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
