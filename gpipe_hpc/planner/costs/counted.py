"""Count FLOPs and bytes of the layers of a model on the meta device: see `LayerCount`."""

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
from gpipe_hpc.planner.costs.layer_trial import (
    BoundaryBytes,
    LayerCount,
    LayerTrial,
    LayerWeight,
    LossLayer,
    as_meta_leaves,
    crossing,
)
from gpipe_hpc.planner.costs.meta import meta_layer
from gpipe_hpc.planner.costs.walk import LayerInput, LayerVisit, VisitResult, walk


@dataclass(frozen=True)
class ModelCount:
    """Counts of a model's layers and loss, its tied parameters and its skip connections.

    Attributes:
      loss: None if the loss was not counted.
      parameter_names: names of each layer's parameters, in the order of its weights. Equal specs
        share one `LayerCount` but may name parameters differently, as blocks of Hugging Face models
        do.
      names: names of the skip connections that start (stashes) and end (pops) at each layer.
      skips: the skip connections as pairs of layers.
      library_bytes: device memory that libraries keep once layers have run.
    """

    inputs: BoundaryBytes
    layers: tuple[LayerCount, ...]
    parameter_names: tuple[tuple[str, ...], ...]
    loss: LayerCount | None
    ties: tuple[Tie, ...]
    names: tuple[SkipNames, ...]
    skips: tuple[Skip, ...]
    library_bytes: int = 0

    def weights(self, layers: Iterable[int]) -> list[LayerWeight]:
        """Return the parameters of some layers; parameters tied among them count once."""
        return list(self.named_weights(layers).values())

    def named_weights(self, layers: Iterable[int]) -> dict[str, LayerWeight]:
        """Return the parameters of some layers by global name; tied ones have their first name."""
        tied = {place: tie.name for tie in self.ties for place in tie.places}
        found: dict[str, LayerWeight] = {}
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
        """Return the number of parameter elements of the model; tied parameters count once."""
        return sum(weight.num_elements for weight in self.weights(range(len(self.layers))))

    def carried(self, skip: Skip) -> BoundaryBytes:
        """Return the bytes that a skip connection transfers for one micro-batch."""
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
    """Count FLOPs, bytes and parameters of every layer and the loss, on the meta device.

    One layer at a time is built, without allocating memory. Equal specs with inputs of equal
    structure are counted once. Modules passed as built modules are not changed.

    Args:
      inputs, targets: nested tensors of one micro-batch, best on the meta device: only shapes
        count.
      device_type: ``cpu`` or ``cuda``; selects the kernels that are assumed.
      precision: precision of the forwards.
      shares_casts: whether a weight is cast once per step; False if graphs are offloaded to the
        host.
      library_bytes: device memory that libraries keep.

    Raises ModelError, naming the layer, if a layer does not run on the meta device.
    """
    how = device_type, precision, shares_casts

    def visit(each: LayerVisit) -> VisitResult[LayerCount]:
        module = meta_layer(each.layer, each.index)
        return LayerTrial(each.where, module, each.names, each.given, *how).count(
            layer_name(each.layer)
        )

    value = as_meta_leaves(inputs)
    counts, output = walk(layers, value, visit)
    loss = None
    if loss_fn is not None:
        ending = LossLayer(loss_fn, as_meta_leaves(targets))
        loss = LayerTrial("loss", ending, SkipNames(), LayerInput(output), *how).count("loss").found
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
    """Yield the parameter names of each layer.

    A layer that shares the count of an equal spec is built again, unless its arguments are
    identical.
    """
    first: dict[int, Layer] = {}
    for index, (count, layer) in enumerate(zip(counts, layers, strict=True)):
        if _is_same_call(first.setdefault(id(count), layer), layer):
            yield tuple(weight.name for weight in count.weights)
        else:
            yield tuple(name for name, _ in meta_layer(layer, index).named_parameters())


def _is_same_call(one: Layer, other: Layer) -> bool:
    """Return whether two equal specs have the same argument objects, not only equal ones."""
    if one is other or not (isinstance(one, LayerSpec) and isinstance(other, LayerSpec)):
        return one is other
    pairs = zip(_arguments(one), _arguments(other), strict=True)
    return all(own is its or isinstance(own, str | int | float) for own, its in pairs)


def _arguments(spec: LayerSpec) -> tuple[Any, ...]:
    return *spec.args, *(value for _, value in sorted(spec.keywords))
