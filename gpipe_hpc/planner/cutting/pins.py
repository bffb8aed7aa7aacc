"""Layers that must be on certain stages, and where that lets each stage end.

Legend as in `minimax`: n layers, K stages. ``end[k]`` is how many layers the first k stages have:
``end[0]`` is 0 and ``end[K]`` is n. A pin of layer i to stage s says ``end[s] <= i < end[s + 1]``.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import Layer, layer_name


class Pin(NamedTuple):
    """A layer, by its index, and its stage; one below 0 counts from the last stage, which is -1."""

    layer: int
    stage: int


Pins = tuple[Pin, ...]


def read_pins(given: Mapping[Any, Any] | None, layers: Sequence[Layer]) -> Pins:
    """Return the pins that a user gives, in the order of layers.

    Keys are layers: an index (below 0: from the end), as a number or as `layers.11`, or the name
    in the table of a cut, where one layer alone has it. Values are stages. Raises PartitionError.
    """
    if not isinstance(given, Mapping | None):
        raise PartitionError(
            f"pipeline.pins: expected stages by layer, got {given!r}; write it as {{0: 0, 11: 2}}"
        )
    found: dict[int, int] = {}
    for key, stage in (given or {}).items():
        layer = _index_of(key, layers)
        if isinstance(stage, bool) or not isinstance(stage, int):
            raise PartitionError(
                f"pipeline.pins: expected a stage for layer {key}, a whole number from 0 up or "
                f"from the last one, -1, down, got {stage!r}; write it as pipeline.pins={{{key}:0}}"
            )
        if layer in found:
            raise PartitionError(
                f"pipeline.pins: expected each layer once, got layers.{layer} twice, the second "
                f"time as {key!r}; leave one out"
            )
        found[layer] = stage
    return tuple(Pin(*each) for each in sorted(found.items()))


def _index_of(key: object, layers: Sequence[Layer]) -> int:
    text = str(key).removeprefix("layers.")
    if text.removeprefix("-").isdecimal() and not isinstance(key, bool):
        index = int(text)
        if not -len(layers) <= index < len(layers):
            raise PartitionError(
                f"pipeline.pins: expected a layer of the model, 0 to {len(layers) - 1}, got "
                f"{key!r}; correct that index"
            )
        return index % len(layers)
    names = [layer_name(layer) for layer in layers]
    if names.count(str(key)) == 1:
        return names.index(str(key))
    if str(key) in names:
        own = [index for index, name in enumerate(names) if name == key]
        raise PartitionError(
            f"pipeline.pins: expected one layer, got {key!r}, which {len(own)} layers are called "
            f"({own[0]} to {own[-1]}); give the index of one of them"
        )
    unlike = ", ".join(name for name in dict.fromkeys(names) if names.count(name) == 1)
    raise PartitionError(
        f"pipeline.pins: expected a layer, by its index (0 to {len(layers) - 1}) or by a name "
        f"that one layer alone has ({unlike or 'none here'}), got {key!r}; correct it"
    )


class Ends(NamedTuple):
    """The least and the most of each end, from ``end[0]`` to ``end[K]``: some cut has each value.

    Every stage has at least one layer.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def free(cls, num_layers: int, num_stages: int) -> "Ends":
        """Return those where no layer is pinned."""
        inner = range(1, num_stages)
        low = (0, *inner, num_layers)
        return cls(low, (0, *(num_layers - num_stages + k for k in inner), num_layers))

    @classmethod
    def where(cls, pins: Pins, num_layers: int, num_stages: int) -> "Ends":
        """Return those with which each pinned layer is on its stage.

        Raises PartitionError, which names two pins, where no cut does.
        """
        low, high = map(list, cls.free(num_layers, num_stages))
        for layer, stage in _checked(pins, num_layers, num_stages):
            high[stage] = min(high[stage], layer)
            low[stage + 1] = max(low[stage + 1], layer + 1)
        for k in range(1, num_stages + 1):
            low[k] = max(low[k], low[k - 1] + 1)
        for k in reversed(range(num_stages)):
            high[k] = min(high[k], high[k + 1] - 1) if k else 0
        return cls(tuple(low), tuple(high))


def holds(pins: Pins, num_layers: int, num_stages: int) -> bool:
    """Say whether some cut into so many stages has every pinned layer on its stage."""
    try:
        Ends.where(pins, num_layers, num_stages)
    except PartitionError:
        return False
    return True


def _checked(pins: Pins, num_layers: int, num_stages: int) -> list[Pin]:
    """Return pins by stages from 0 up; PartitionError unless some cut has them all.

    Between two layers there has to be one at least for each stage between theirs. That no two
    neighbours contradict each other is enough: the ends that these leave are in order.
    """
    known = []
    for pin in pins:
        if not -num_stages <= pin.stage < num_stages:
            raise PartitionError(
                f"pipeline.pins: expected layers.{pin.layer} on a stage of 0 to "
                f"{num_stages - 1}, got stage {pin.stage}; correct it, or use more stages"
            )
        known.append(pin._replace(stage=pin.stage % num_stages))
    # The first layer is on the first stage, and the last one on the last, whatever is pinned.
    edges = [Pin(0, 0), *known, Pin(num_layers - 1, num_stages - 1)]
    for (layer, stage), (later, behind) in pairwise(edges):
        if not 0 <= behind - stage <= later - layer:
            raise PartitionError(
                f"pipeline.pins: no cut into {num_stages} stages holds them, expected layers in "
                f"order, the first on stage 0 and the last on stage {num_stages - 1}, and one at "
                f"least on each, got layers.{layer} on stage {stage} and "
                f"layers.{later} on stage {behind}; pin fewer layers, or change the stages"
            )
    return known


def pins_text(pins: Pins, layers: Sequence[Layer], num_stages: int) -> str:
    """Say in one line which layers are pinned to which stages; nothing where none is."""
    each = [f"layers.{i} {layer_name(layers[i])} on stage {s % num_stages}" for i, s in pins]
    return f"pinned (pipeline.pins): {', '.join(each)}" if each else ""


def check_pinned(pins: Pins, counts: Sequence[int]) -> None:
    """Raise PartitionError, which names a pin, unless a cut by hand has each on its stage."""
    ends = [0, *accumulate(counts)]
    for pin in pins:
        stage = pin.stage % len(counts) if -len(counts) <= pin.stage < len(counts) else None
        if stage is None or not ends[stage] <= pin.layer < ends[stage + 1]:
            raise PartitionError(
                f"pipeline.pins: expected layers.{pin.layer} on stage {pin.stage}, got the cut "
                f"{list(counts)} of pipeline.partition, where it is elsewhere; change one of them"
            )
