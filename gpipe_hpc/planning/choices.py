"""All that is worth choosing between recomputing and keeping the layers of one stage.

Dynamic programming over the layers of a stage, in order: each is kept or run again. Of a front of
pairs (bytes that live of a micro-batch, cost of running again) only those stay that no other beats
in both. Two fronts may be compared where the rest of the stage cannot tell them apart: the last
layer was treated alike, and so was each storage that a later layer may keep as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.planning.storages import OUTSIDE, StageStorages

Integers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.signedinteger[Any]]

MAX_CHOICES: Final = 4096
"""Longest front. Of a longer one some choices are left out, evenly by bytes, its ends never."""


@dataclass(frozen=True)
class Choices:
    """What a stage may keep of a micro-batch, ascending, and the least cost for which.

    The first is the least that it can keep, the last costs nothing.
    """

    kept_bytes: Integers
    costs: Integers
    _ends: "_Origins"
    _trail: "tuple[tuple[_Origins, ...], ...]"

    def recomputed(self, choice: int) -> frozenset[int]:
        """Return the positions of the layers that a choice recomputes."""
        found: list[int] = []
        origins = self._ends
        for position in reversed(range(len(self._trail))):
            state, choice = int(origins.states[choice]), int(origins.parents[choice])
            origins = self._trail[position][state]
            if origins.again:
                found.append(position)
        return frozenset(found)


def stage_choices(storages: StageStorages, costs: Sequence[int]) -> Choices:
    """Return the choices of a stage; `costs` are those of running each layer again, integers.

    Exact, but where a front outgrows `MAX_CHOICES`.
    """
    steps = _Steps(storages)
    states = [_State(False, frozenset(), frozenset())]
    fronts = [_Front(_column(steps.held_bytes), _column(0), _Origins(_column(0), _column(0)))]
    trail: list[tuple[_Origins, ...]] = []
    for position, cost in enumerate(costs):
        grown: dict[_State, list[_Front]] = {}
        for number, (state, front) in enumerate(zip(states, fronts, strict=True)):
            for again in (False, True):
                after, added = steps.take(state, position, again)
                longer = front.extended(number, added, cost if again else 0)
                grown.setdefault(after, []).append(longer)
        states = list(grown)
        longest = max(2, MAX_CHOICES // len(states))
        fronts = [_merged(parts, longest, after.again) for after, parts in grown.items()]
        trail.append(tuple(front.origins for front in fronts))
    ends = [front.extended(number, 0, 0) for number, front in enumerate(fronts)]
    merged = _merged(ends, MAX_CHOICES)
    return Choices(merged.kept_bytes, merged.costs, merged.origins, tuple(trail))


class _State(NamedTuple):
    """What the rest of a stage needs to know of the layers so far.

    Whether the last one is recomputed, which storages live that a later layer may keep too, and
    which stashes still to be popped were made within the segment that goes on.
    """

    again: bool
    counted: frozenset[int]
    sources: frozenset[int]


class _Origins(NamedTuple):
    """Where each pair of a front came from: the number of a state, and the place in its front."""

    states: Indices
    parents: Indices
    again: bool = False


class _Front(NamedTuple):
    """Pairs of bytes and cost, none beating another."""

    kept_bytes: Integers
    costs: Integers
    origins: _Origins

    def extended(self, state: int, nbytes: int, cost: int) -> "_Front":
        """Return this front with all amounts raised, and itself, by its number, as the origin."""
        places = np.arange(len(self.costs), dtype=np.int32)
        origins = _Origins(np.full_like(places, state), places)
        return _Front(self.kept_bytes + nbytes, self.costs + cost, origins)


class _Steps:
    """What one layer more adds to what lives, and what is still open behind it."""

    def __init__(self, storages: StageStorages) -> None:
        self.held_bytes = sum(storages.sizes[number] for number in storages.held)
        self._storages = storages
        # The last layer that a storage may live for, and that pops what a layer stashed.
        self._last_use: dict[int, int] = {}
        self._last_pop: dict[int, int] = {}
        for position, layer in enumerate(storages.layers):
            used = layer.kept.union(layer.value, *(storages for _, storages in layer.popped))
            self._last_use.update(dict.fromkeys(used - storages.held, position))
            self._last_pop.update({source: position for source, _ in layer.popped})
        self._last_pop.pop(OUTSIDE, None)

    def take(self, state: _State, position: int, again: bool) -> tuple[_State, int]:
        """Return the state behind a layer, and the bytes that it makes live."""
        layer = self._storages.layers[position]
        nbytes = 0
        sources: frozenset[int] = frozenset()
        if again:
            goes_on = state.again
            inside = state.sources if goes_on else frozenset()
            needed = frozenset() if goes_on else layer.value
            needed = needed.union(*(own for source, own in layer.popped if source not in inside))
            sources = frozenset(
                source for source in inside | {position} if self._last_pop.get(source, 0) > position
            )
        else:
            nbytes, needed = layer.inside, layer.kept
        new = needed - state.counted - self._storages.held
        nbytes += sum(self._storages.sizes[number] for number in new)
        counted = frozenset(n for n in state.counted | new if self._last_use[n] > position)
        return _State(again, counted, sources), nbytes


def _column(number: int) -> Any:
    return np.array([number], dtype=np.int64)


def _merged(fronts: Sequence[_Front], longest: int, again: bool = False) -> _Front:
    """Return what no other pair beats, thinned out to `longest` pairs."""
    kept = np.concatenate([front.kept_bytes for front in fronts])
    costs = np.concatenate([front.costs for front in fronts])
    order = thinned(undominated(kept, costs), longest)
    states = np.concatenate([front.origins.states for front in fronts])
    parents = np.concatenate([front.origins.parents for front in fronts])
    return _Front(kept[order], costs[order], _Origins(states[order], parents[order], again))


def undominated(amounts: Integers, costs: Integers) -> Indices:
    """Return the places of the pairs that no other beats in both, by ascending amounts."""
    order = np.lexsort((costs, amounts))
    cheapest = np.minimum.accumulate(costs[order])
    wins = np.ones(len(order), dtype=np.bool_)
    wins[1:] = cheapest[1:] < cheapest[:-1]
    return order[wins]


def thinned(places: Indices, longest: int) -> Indices:
    """Return at most `longest` of the places, evenly; the first and the last stay."""
    if len(places) <= longest:
        return places
    return places[np.linspace(0, len(places) - 1, longest).round().astype(np.int64)]
