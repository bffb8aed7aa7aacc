"""Count what the layers of a model cost without running them: see `LayerCount`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_hpc.models import (
    Layer,
    LayerSpec,
    Skip,
    SkipNames,
    Tie,
    find_skips,
    find_ties,
    global_name,
    layer_name,
    skip_names,
)
from gpipe_hpc.planner.costs.meta import meta_layer
from gpipe_hpc.planner.costs.trial import (
    Crossing,
    LayerCount,
    Loss,
    Trial,
    Weight,
    crossing,
    forgotten,
)
from gpipe_hpc.planner.costs.walk import Given, Passed, Visit, walk


@dataclass(frozen=True)
class ModelCount:
    """The layers of a model, the loss behind them if it was counted, and what they share.

    `parameter_names`: of each layer, in the order of its weights. Equal specs share one
    `LayerCount`, but name their parameters as they like: each block of a Hugging Face model has
    its number in them. `names` are what each layer stashes and pops, `skips` the same as pairs of
    layers.
    `library_bytes`: what the device's libraries keep once layers have run on it.
    """

    inputs: Crossing
    layers: tuple[LayerCount, ...]
    parameter_names: tuple[tuple[str, ...], ...]
    loss: LayerCount | None
    ties: tuple[Tie, ...]
    names: tuple[SkipNames, ...]
    skips: tuple[Skip, ...]
    library_bytes: int = 0

    def weights(self, layers: Iterable[int]) -> list[Weight]:
        """Return the parameters of some layers, those tied among them once."""
        return list(self.named_weights(layers).values())

    def named_weights(self, layers: Iterable[int]) -> dict[str, Weight]:
        """Return them by global name; a tied one has that of its first place."""
        tied = {place: tie.name for tie in self.ties for place in tie.places}
        found: dict[str, Weight] = {}
        for index in layers:
            weights = self.layers[index].weights
            for own, weight in zip(self.parameter_names[index], weights, strict=True):
                name = tied.get((index, own), global_name(index, own))
                cast_bytes = found.get(name, weight).cast_bytes
                # Not every layer that shares a weight needs it cast.
                is_cast = cast_bytes > weight.cast_bytes
                found[name] = weight._replace(cast_bytes=cast_bytes) if is_cast else weight
        return found

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model, tied ones once."""
        return sum(weight.num_elements for weight in self.weights(range(len(self.layers))))

    def carried(self, skip: Skip) -> Crossing:
        """Return what a skip carries."""
        place = self.names[skip.source].stashes.index(skip.name)
        return self.layers[skip.source].stashed[place]


def count_model(
    layers: Sequence[Layer],
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    device_type: str = "cpu",
    precision: str = "float32",
    shares_casts: bool = True,
    library_bytes: int = 0,
) -> ModelCount:
    """Count every layer, and the loss, for a micro-batch of the structure of `inputs`.

    `inputs` and `targets` are nests of tensors, best on the meta device: only their shapes count.
    One layer at a time is built, without allocating; equal specs on inputs of equal structure are
    counted once. `device_type`, cpu or cuda, says which kernels to expect, `precision` in which
    one forwards compute, `shares_casts` whether a weight is cast once a step: not where graphs
    move to the host. `library_bytes`: what the device's libraries keep. Modules that come built
    stay as they are. Raises `ModelError`, naming the layer, for one that does not run so.
    """
    how = device_type, precision, shares_casts

    def visit(each: Visit) -> Passed[LayerCount]:
        module = meta_layer(each.layer, each.index)
        return Trial(each.where, module, each.names, each.given, *how).count(layer_name(each.layer))

    value = forgotten(inputs)
    counts, output = walk(layers, value, visit)
    loss = None
    if loss_fn is not None:
        ending = Loss(loss_fn, forgotten(targets))
        loss = Trial("loss", ending, SkipNames(), Given(output), *how).count("loss").found
    return ModelCount(
        inputs=crossing(value),
        layers=tuple(counts),
        parameter_names=tuple(_parameter_names(counts, layers)),
        loss=loss,
        ties=tuple(find_ties(layers)),
        names=tuple(map(skip_names, layers)),
        skips=find_skips(layers),
        library_bytes=library_bytes,
    )


def _parameter_names(
    counts: Sequence[LayerCount], layers: Sequence[Layer]
) -> Iterator[tuple[str, ...]]:
    """Yield the names of each layer's parameters.

    A layer that shares its count is built again, unless it is of the same call.
    """
    first: dict[int, Layer] = {}
    for index, (count, layer) in enumerate(zip(counts, layers, strict=True)):
        if _is_same_call(first.setdefault(id(count), layer), layer):
            yield tuple(weight.name for weight in count.weights)
        else:
            yield tuple(name for name, _ in meta_layer(layer, index).named_parameters())


def _is_same_call(one: Layer, other: Layer) -> bool:
    """Say whether two equal specs have not only equal arguments but the same."""
    if one is other or not (isinstance(one, LayerSpec) and isinstance(other, LayerSpec)):
        return one is other
    pairs = zip(_arguments(one), _arguments(other), strict=True)
    return all(own is its or isinstance(own, str | int | float) for own, its in pairs)


def _arguments(spec: LayerSpec) -> tuple[Any, ...]:
    return *spec.args, *(value for _, value in sorted(spec.keywords))
