"""One walk over the layers of a model, for whatever is to be found out about each of them."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from gpipe_hpc.models import Layer, LayerSpec, SkipNames, find_skips, layer_name, skip_names
from gpipe_hpc.pytree import flatten

T = TypeVar("T")


class Given(NamedTuple):
    """What a layer is run on: a nest, and one for each name that it pops."""

    value: Any
    popped: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Visit:
    """A layer, and what the layers ahead of it give it."""

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
    """What was found about a layer, and what the layers behind it are given."""

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
    """Visit the layers in order, each on what the ones before it gave; return what was found.

    Also returned is the output of the last layer. Equal specs whose inputs have equal structure
    are visited once, except layers that stand in `alone` by their index. Raises `ModelError` for
    skips that cannot be.
    """
    find_skips(layers)  # refuses what cannot be popped
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
    """Return what decides the cost of running on a nest: its structure, not its numbers."""
    leaves, tree = flatten(nest)
    described = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return tree, described


def described(nest: Any) -> str:
    """Return the dtypes and shapes of a nest's tensors, and the types of all else, for messages."""
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in flatten(nest)[0]
    )
