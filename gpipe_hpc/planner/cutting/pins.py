"""Layers pinned to stages, and the range of each stage's end that the pins allow.

Notation as in `minimax`: n layers, K stages. ``end[k]`` is the number of layers of the first k
stages: ``end[0]`` is 0 and ``end[K]`` is n. A pin of layer i to stage s means ``end[s] <= i < end[s
+ 1]``.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import Layer, layer_name


class Pin(NamedTuple):
    """A layer index and the stage that it must be on; stage -1 is the last one."""

    layer: int
    stage: int


Pins = tuple[Pin, ...]


def read_pins(given: Mapping[Any, Any] | None, layers: Sequence[Layer]) -> Pins:
    """Parse the pins of a user and return them sorted by layer.

    Keys are layers: an index (negative: from the end), as a number or as ``layers.11``, or the
    layer's name in the partition table if it is unique. Values are stages. Raises PartitionError.
    """
    if not isinstance(given, Mapping | None):
        raise PartitionError(
            f"pipeline.pins: expected a mapping from layers to stages, got {given!r}; for example "
            f"{{0: 0, 11: 2}}"
        )
    found: dict[int, int] = {}
    for key, stage in (given or {}).items():
        layer = _index_of(key, layers)
        if isinstance(stage, bool) or not isinstance(stage, int):
            raise PartitionError(
                f"pipeline.pins: expected an integer stage for layer {key} (negative: from the "
                f"last stage), got {stage!r}; for example pipeline.pins={{{key}:0}}"
            )
        if layer in found:
            raise PartitionError(
                f"pipeline.pins: layers.{layer} is pinned twice, the second time as {key!r}; "
                f"remove one of the pins"
            )
        found[layer] = stage
    return tuple(Pin(*each) for each in sorted(found.items()))


def _index_of(key: object, layers: Sequence[Layer]) -> int:
    text = str(key).removeprefix("layers.")
    if text.removeprefix("-").isdecimal() and not isinstance(key, bool):
        index = int(text)
        if not -len(layers) <= index < len(layers):
            raise PartitionError(
                f"pipeline.pins: expected a layer index from 0 to {len(layers) - 1}, got {key!r}; "
                f"correct that index"
            )
        return index % len(layers)
    names = [layer_name(layer) for layer in layers]
    if names.count(str(key)) == 1:
        return names.index(str(key))
    if str(key) in names:
        own = [index for index, name in enumerate(names) if name == key]
        raise PartitionError(
            f"pipeline.pins: {key!r} is the name of {len(own)} layers ({own[0]} to {own[-1]}); "
            f"use the index of one of them"
        )
    unlike = ", ".join(name for name in dict.fromkeys(names) if names.count(name) == 1)
    raise PartitionError(
        f"pipeline.pins: no layer {key!r}; use an index (0 to {len(layers) - 1}) or a unique name "
        f"({unlike or 'this model has none'})"
    )


class EndRanges(NamedTuple):
    """Smallest and largest value of each ``end[0]`` to ``end[K]`` over all valid partitions.

    Every stage has at least one layer.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]

    @classmethod
    def free(cls, num_layers: int, num_stages: int) -> "EndRanges":
        """Return the ranges without pins."""
        inner = range(1, num_stages)
        low = (0, *inner, num_layers)
        return cls(low, (0, *(num_layers - num_stages + k for k in inner), num_layers))

    @classmethod
    def where(cls, pins: Pins, num_layers: int, num_stages: int) -> "EndRanges":
        """Return the ranges in which each pinned layer is on its stage.

        Raises PartitionError, naming two pins, if no partition satisfies them.
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


def has_valid_cut(pins: Pins, num_layers: int, num_stages: int) -> bool:
    """Return whether some partition into `num_stages` stages satisfies all pins."""
    try:
        EndRanges.where(pins, num_layers, num_stages)
    except PartitionError:
        return False
    return True


def _checked(pins: Pins, num_layers: int, num_stages: int) -> list[Pin]:
    """Return the pins with nonnegative stages, after checking that some partition satisfies them.

    Raises PartitionError otherwise. Between two pinned layers there must be at least one layer for
    each stage between their stages. Checking neighbouring pins is sufficient, because it keeps the
    resulting ranges ordered.
    """
    known = []
    for pin in pins:
        if not -num_stages <= pin.stage < num_stages:
            raise PartitionError(
                f"pipeline.pins: layers.{pin.layer} is pinned to stage {pin.stage}, but stages are "
                f"0 to {num_stages - 1}; correct it, or use more stages"
            )
        known.append(pin._replace(stage=pin.stage % num_stages))
    # The first layer is always on the first stage, and the last one on the last.
    edges = [Pin(0, 0), *known, Pin(num_layers - 1, num_stages - 1)]
    for (layer, stage), (later, behind) in pairwise(edges):
        if not 0 <= behind - stage <= later - layer:
            raise PartitionError(
                f"pipeline.pins: no cut into {num_stages} stages puts layers.{layer} on stage "
                f"{stage} and layers.{later} on stage {behind}: stages are in the order of layers, "
                f"from the first layer on stage 0 to the last on stage {num_stages - 1}, with at "
                f"least one layer each; pin fewer layers, or change the number of stages"
            )
    return known


def pins_text(pins: Pins, layers: Sequence[Layer], num_stages: int) -> str:
    """List the pinned layers and their stages in one line; empty without pins."""
    each = [f"layers.{i} {layer_name(layers[i])} on stage {s % num_stages}" for i, s in pins]
    return f"pinned (pipeline.pins): {', '.join(each)}" if each else ""


def check_pinned(pins: Pins, counts: Sequence[int]) -> None:
    """Raise PartitionError, naming a pin, unless the user's partition satisfies all pins."""
    ends = [0, *accumulate(counts)]
    for pin in pins:
        stage = pin.stage % len(counts) if -len(counts) <= pin.stage < len(counts) else None
        if stage is None or not ends[stage] <= pin.layer < ends[stage + 1]:
            raise PartitionError(
                f"pipeline.pins: layers.{pin.layer} is pinned to stage {pin.stage}, but "
                f"pipeline.partition={list(counts)} puts it on another stage; change one of them"
            )
