"""Find all useful combinations of recomputed and kept layers of a stage by dynamic programming.

The layers are processed in order; each is kept or recomputed. A front holds the choices so far that
are Pareto-optimal in memory and cost. Two fronts are merged if the remaining layers cannot
distinguish them: the last layer and each storage that a later layer may also keep have been treated
alike.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_hpc.planner.memory.storages import LifetimeBytes, StageStorages

Integers = npt.NDArray[np.int64]
Indices = npt.NDArray[np.signedinteger[Any]]

Weights = tuple[int, int]
"""Numbers of live micro-batches that are still to be recomputed, and that have been recomputed."""

MAX_CHOICES: Final = 4096
"""Maximum length of a front. Longer fronts are thinned out evenly; both ends are kept."""


@dataclass(frozen=True)
class RecomputeChoices:
    """Memory and cost of the useful ways to recompute a stage, one array element per way.

    Attributes:
      kept_bytes: bytes per micro-batch that are kept until recomputation.
      full_bytes: bytes per micro-batch after recomputation.
      costs: cost of recomputing one micro-batch.
    """

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
) -> RecomputeChoices:
    """Return the useful ways to recompute a stage; `costs` are integer costs of each layer.

    A way is dropped if a single other one costs no more and needs no more memory under all
    `weights`. The result is exact unless a front exceeds `MAX_CHOICES`.
    """
    weights = _extremes(weights)
    steps = _LayerStep(storages)
    states: list[_LayerState] = [_LayerState(None, frozenset(), frozenset())]
    zero = np.zeros(1, dtype=np.int64)
    origins = _Origins(zero.astype(np.int32), zero.astype(np.int32))
    held = zero + storages.nbytes(storages.held)
    fronts = [_ParetoFront(held, held, zero, origins)]
    trail: list[tuple[_Origins, ...]] = []
    for position, cost in enumerate(costs):
        grown: dict[_LayerState, list[_ParetoFront]] = {}
        for number, (state, front) in enumerate(zip(states, fronts, strict=True)):
            for again in (False, True):
                after, added = steps.take(state, position, again)
                longer = front.extended(number, added, cost if again else 0)
                grown.setdefault(after, []).append(longer)
        states = list(grown)
        longest = max(2, MAX_CHOICES // len(states))
        fronts = [_merged(p, weights, longest, after.again) for after, p in grown.items()]
        trail.append(tuple(front.origins for front in fronts))
    ends = [front.extended(number, LifetimeBytes(0, 0), 0) for number, front in enumerate(fronts)]
    merged = _merged(ends, weights, MAX_CHOICES)
    return RecomputeChoices(*merged, tuple(trail))


class _LayerState(NamedTuple):
    """The facts about the layers processed so far that affect the remaining layers.

    Attributes:
      again: whether the last layer is recomputed.
      counted: live storages that a later layer may also keep.
      made: storages created in the current sequence of recomputed layers and not yet saved there.
    """

    again: bool | None
    counted: frozenset[int]
    made: frozenset[int]


class _Origins(NamedTuple):
    """Predecessor of each choice of a front: index of its state, index in that state's front."""

    states: Indices
    parents: Indices
    again: bool | None = None


class _ParetoFront(NamedTuple):
    """The Pareto-optimal choices for the layers processed so far."""

    kept_bytes: Integers
    full_bytes: Integers
    costs: Integers
    origins: _Origins

    def extended(self, state: int, added: LifetimeBytes, cost: int) -> "_ParetoFront":
        """Return this front with memory and cost increased and itself as origin of each choice."""
        places = np.arange(len(self.costs), dtype=np.int32)
        origins = _Origins(np.full_like(places, state), places)
        kept, full = self.kept_bytes + added.kept, self.full_bytes + added.full
        return _ParetoFront(kept, full, self.costs + cost, origins)


class _LayerStep:
    """The transition of the dynamic program: one more layer, and the memory that it adds."""

    def __init__(self, storages: StageStorages) -> None:
        self._storages = storages
        self._last_use: dict[int, int] = {}
        for position, layer in enumerate(storages.layers):
            used = (layer.kept | layer.given) - storages.held
            self._last_use.update(dict.fromkeys(used, position))

    def take(
        self, state: _LayerState, position: int, again: bool
    ) -> tuple[_LayerState, LifetimeBytes]:
        """Return the state after a layer, and the bytes that it adds."""
        storages = self._storages
        layer = storages.layers[position]
        needed = frozenset() if again else layer.kept
        made = state.made
        if again is not state.again:
            needed |= layer.given if again else layer.leaves
            made = frozenset()
        extra = 0
        if again:
            made |= layer.made
            extra = layer.inside + storages.nbytes(layer.kept & made)
            made -= layer.kept
        new = needed - state.counted - storages.held
        kept = storages.nbytes(new) + layer.state + (0 if again else layer.inside)
        after = _LayerState(
            again, self._open(state.counted | new, position), self._open(made, position)
        )
        return after, LifetimeBytes(kept, kept + extra)

    def _open(self, storages: frozenset[int], position: int) -> frozenset[int]:
        return frozenset(n for n in storages if self._last_use.get(n, -1) > position)


def _extremes(weights: Collection[Weights]) -> tuple[Weights, ...]:
    """Return the one or two extreme weights; the others are nonnegative combinations of them."""

    def share(weight: Weights) -> float:
        return weight[1] / sum(weight)

    return tuple({min(weights, key=share), max(weights, key=share)})


def _merged(
    fronts: Sequence[_ParetoFront],
    weights: Collection[Weights],
    longest: int,
    again: bool | None = None,
) -> _ParetoFront:
    """Return the Pareto-optimal choices of several fronts, at most `longest` for each weight."""
    kept = np.concatenate([front.kept_bytes for front in fronts])
    full = np.concatenate([front.full_bytes for front in fronts])
    costs = np.concatenate([front.costs for front in fronts])
    amounts = [kept * of_kept + full * of_full for of_kept, of_full in weights]
    order = _best(amounts, costs, longest)
    states = np.concatenate([front.origins.states for front in fronts])[order]
    parents = np.concatenate([front.origins.parents for front in fronts])[order]
    return _ParetoFront(kept[order], full[order], costs[order], _Origins(states, parents, again))


def _best(amounts: Sequence[Integers], costs: Integers, longest: int) -> Indices:
    if len(amounts) == 1:
        return thinned(undominated(amounts[0], costs), longest)
    first, second = amounts
    order = undominated_by_one(first, second, costs)
    if len(order) <= longest:
        return order
    # Prefer the choices that are best under either weight or under their sum.
    sums = (first, second, first + second)
    fronts = [thinned(undominated(each, costs), longest) for each in sums]
    return np.unique(np.concatenate(fronts))


def undominated_by_one(first: Integers, second: Integers, costs: Integers) -> Indices:
    """Return the indices of the triples that no single other triple beats in all three values.

    They are sorted by ascending cost. A triple beaten in `first` by one triple and in `second` by
    another is kept.
    """
    order = np.lexsort((second, first, costs))
    # The cheaper triples form a staircase: `second` falls as `first` rises.
    ends: list[int] = []
    steps: list[int] = []
    places: list[int] = []
    triples = zip(order.tolist(), first[order].tolist(), second[order].tolist(), strict=True)
    for place, x, y in triples:
        at = bisect_right(ends, x)
        if at and steps[at - 1] <= y:
            continue
        at -= bool(at) and ends[at - 1] == x
        stop = at
        while stop < len(steps) and steps[stop] >= y:
            stop += 1
        ends[at:stop], steps[at:stop] = [x], [y]
        places.append(place)
    return np.array(places, dtype=np.int64)


def undominated(amounts: Integers, costs: Integers) -> Indices:
    """Return the indices of the Pareto-optimal pairs (both minimized), by ascending amounts."""
    order = np.lexsort((costs, amounts))
    cheapest = np.minimum.accumulate(costs[order])
    wins = np.ones(len(order), dtype=np.bool_)
    wins[1:] = cheapest[1:] < cheapest[:-1]
    return order[wins]


def thinned(places: Indices, longest: int) -> Indices:
    """Return at most `longest` evenly spaced elements, including the first and the last."""
    if len(places) <= longest:
        return places
    return places[np.linspace(0, len(places) - 1, longest).round().astype(np.int64)]
