"""All that is worth choosing between recomputing and keeping the layers of one stage.

Dynamic programming over the layers of a stage, in order: each is kept or run again. Of a front of
choices only those stay that no other beats in memory and cost. Two fronts may be compared where
the rest of the stage cannot tell them apart: the last layer was treated alike, and so was each
storage that a later layer may keep as well.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.planner.memory.storages import Lives, StageStorages

Integers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.signedinteger[Any]]

Weights = tuple[int, int]
"""How many micro-batches live that are still to be recomputed, and that are already."""

MAX_CHOICES: Final = 4096
"""Longest front under one weight. Of a longer one some choices are left out, evenly by bytes, its
ends never."""


@dataclass(frozen=True)
class Choices:
    """What a stage may keep of a micro-batch, what then lives behind R, and the least cost."""

    kept_bytes: Integers
    full_bytes: Integers
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


def stage_choices(
    storages: StageStorages, costs: Sequence[int], weights: Collection[Weights]
) -> Choices:
    """Return the choices of a stage; `costs` are those of running each layer again, integers.

    A choice is left out if one other costs as little and needs no more under all of the weights.
    Exact, but where a front outgrows `MAX_CHOICES`.
    """
    weights = _extremes(weights)
    steps = _Steps(storages)
    states: list[_State] = [_State(None, frozenset(), frozenset())]
    zero = np.zeros(1, dtype=np.int64)
    origins = _Origins(zero.astype(np.int32), zero.astype(np.int32))
    held = zero + storages.nbytes(storages.held)
    fronts = [_Front(held, held, zero, origins)]
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
        fronts = [_merged(p, weights, longest, after.again) for after, p in grown.items()]
        trail.append(tuple(front.origins for front in fronts))
    ends = [front.extended(number, Lives(0, 0), 0) for number, front in enumerate(fronts)]
    merged = _merged(ends, weights, MAX_CHOICES)
    return Choices(*merged, tuple(trail))


class _State(NamedTuple):
    """What the rest of a stage needs to know of the layers so far.

    Whether the last one is recomputed, which storages live that a later layer may keep too, and
    which were made within the run that is recomputed, but not saved there yet.
    """

    again: bool | None
    counted: frozenset[int]
    made: frozenset[int]


class _Origins(NamedTuple):
    """Where each choice of a front came from: the number of a state, and the place in its front."""

    states: Indices
    parents: Indices
    again: bool | None = None


class _Front(NamedTuple):
    """Choices for the layers so far, none beating another."""

    kept_bytes: Integers
    full_bytes: Integers
    costs: Integers
    origins: _Origins

    def extended(self, state: int, added: Lives, cost: int) -> "_Front":
        """Return this front with all amounts raised, and itself, by its number, as the origin."""
        places = np.arange(len(self.costs), dtype=np.int32)
        origins = _Origins(np.full_like(places, state), places)
        kept, full = self.kept_bytes + added.kept, self.full_bytes + added.full
        return _Front(kept, full, self.costs + cost, origins)


class _Steps:
    """What one layer more adds to what lives, and what is still open behind it."""

    def __init__(self, storages: StageStorages) -> None:
        self._storages = storages
        self._last_use: dict[int, int] = {}
        for position, layer in enumerate(storages.layers):
            used = (layer.kept | layer.given) - storages.held
            self._last_use.update(dict.fromkeys(used, position))

    def take(self, state: _State, position: int, again: bool) -> tuple[_State, Lives]:
        """Return the state behind a layer, and the bytes that it makes live."""
        storages = self._storages
        layer = storages.layers[position]
        needed = frozenset() if again else layer.kept
        made = state.made
        if again is not state.again:
            needed |= layer.given if again else layer.leaves
            made = frozenset()
        anew = 0
        if again:
            made |= layer.made
            anew = layer.inside + storages.nbytes(layer.kept & made)
            made -= layer.kept
        new = needed - state.counted - storages.held
        kept = storages.nbytes(new) + layer.state + (0 if again else layer.inside)
        after = _State(again, self._open(state.counted | new, position), self._open(made, position))
        return after, Lives(kept, kept + anew)

    def _open(self, storages: frozenset[int], position: int) -> frozenset[int]:
        return frozenset(n for n in storages if self._last_use.get(n, -1) > position)


def _extremes(weights: Collection[Weights]) -> tuple[Weights, ...]:
    """Return the two weights, or the only one, of which each weight is a sum: they decide."""

    def share(weight: Weights) -> float:
        return weight[1] / sum(weight)

    return tuple({min(weights, key=share), max(weights, key=share)})


def _merged(
    fronts: Sequence[_Front],
    weights: Collection[Weights],
    longest: int,
    again: bool | None = None,
) -> _Front:
    """Return what no other choice beats, thinned out to `longest` choices for each weight."""
    kept = np.concatenate([front.kept_bytes for front in fronts])
    full = np.concatenate([front.full_bytes for front in fronts])
    costs = np.concatenate([front.costs for front in fronts])
    amounts = [kept * of_kept + full * of_full for of_kept, of_full in weights]
    order = _best(amounts, costs, longest)
    states = np.concatenate([front.origins.states for front in fronts])[order]
    parents = np.concatenate([front.origins.parents for front in fronts])[order]
    return _Front(kept[order], full[order], costs[order], _Origins(states, parents, again))


def _best(amounts: Sequence[Integers], costs: Integers, longest: int) -> Indices:
    if len(amounts) == 1:
        return thinned(undominated(amounts[0], costs), longest)
    first, second = amounts
    order = undominated_by_one(first, second, costs)
    if len(order) <= longest:
        return order
    # What is best under either of the weights, or under both together, matters most.
    sums = (first, second, first + second)
    fronts = [thinned(undominated(each, costs), longest) for each in sums]
    return np.unique(np.concatenate(fronts))


def undominated_by_one(first: Integers, second: Integers, costs: Integers) -> Indices:
    """Return the places of the triples that no other single one beats in all, by ascending cost.

    To lose to one triple in `first` and to another in `second` is not to be beaten.
    """
    order = np.lexsort((second, first, costs))
    # Of the cheaper ones a staircase: the further along in `first`, the less in `second`.
    ends: list[int] = []
    steps: list[int] = []
    places: list[int] = []
    triples = zip(order.tolist(), first[order].tolist(), second[order].tolist(), strict=True)
    for place, x, y in triples:
        at = bisect_right(ends, x)
        if at and steps[at - 1] <= y:
            continue
        at -= bool(at) and ends[at - 1] == x
        behind = at
        while behind < len(steps) and steps[behind] >= y:
            behind += 1
        ends[at:behind], steps[at:behind] = [x], [y]
        places.append(place)
    return np.array(places, dtype=np.int64)


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
