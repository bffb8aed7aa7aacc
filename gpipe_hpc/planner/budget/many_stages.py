"""Select the recomputation of several stages whose ranks hold more than one of them."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from gpipe_hpc.planner.budget.one_stage import (
    Indices,
    Integers,
    RecomputeChoices,
    thinned,
    undominated,
)

MAX_SELECTIONS: Final = 2048
"""Maximum number of partial selections that are kept; the result is exact below it."""

_MAX_PICKS: Final = 512  # maximum number of fitting choices per stage, if there are several stages


class MemoryLimit(NamedTuple):
    """A memory limit of a rank at one moment of its step.

    Attributes:
      kept: by stage, number of live micro-batches that are still to be recomputed.
      full: by stage, number of live micro-batches that have been recomputed.
      room: bytes that the stages may use.
    """

    rank: int
    kept: Mapping[int, int]
    full: Mapping[int, int]
    room: float

    def used(self, stage: int, choices: RecomputeChoices) -> Integers:
        """Return the bytes that a stage needs at this moment for each of its choices."""
        kept, full = self.kept.get(stage, 0), self.full.get(stage, 0)
        return choices.kept_bytes * kept + choices.full_bytes * full


def select(
    choices: Mapping[int, RecomputeChoices], runs: Mapping[int, int], limits: Sequence[MemoryLimit]
) -> dict[int, int] | None:
    """Return, for each stage, the index of its choice in the cheapest selection within all limits.

    The cost of a stage counts `runs` times. Returns None if no selection meets all limits.
    """
    stages = list(choices)
    uses = {
        stage: np.stack([limit.used(stage, choices[stage]) for limit in limits], axis=1)
        for stage in stages
    }
    room = np.array([limit.room for limit in limits])
    used = np.zeros((1, len(limits)), dtype=np.int64)
    costs = np.zeros(1, dtype=np.int64)
    trail: list[tuple[Indices, Indices]] = []
    least = {stage: uses[stage].min(axis=0) for stage in stages}
    rest = whole = np.stack(list(least.values())).sum(axis=0)
    for stage in stages:
        own = choices[stage]
        others = whole - least[stage]
        picks = np.flatnonzero((uses[stage] + others <= room).all(axis=1))
        if len(stages) > 1:
            picks = picks[np.argsort(own.kept_bytes[picks], kind="stable")]
            picks = thinned(picks, _MAX_PICKS)
        rest = rest - least[stage]
        used = (used[:, None, :] + uses[stage][picks]).reshape(-1, len(limits))
        costs = (costs[:, None] + runs[stage] * own.costs[picks]).ravel()
        places = np.flatnonzero((used + rest <= room).all(axis=1))
        if not len(places):
            return None
        if stage == stages[-1]:
            places = places[[costs[places].argmin()]]
        else:
            places = places[_best(used[places], costs[places])]
        trail.append((places // len(picks), picks[places % len(picks)]))
        used, costs = used[places], costs[places]
    selected: dict[int, int] = {}
    at = 0
    for stage, (before, picked) in zip(reversed(stages), reversed(trail), strict=True):
        selected[stage] = int(picked[at])
        at = int(before[at])
    return selected


def _best(used: Integers, costs: Integers) -> Indices:
    """Return the indices of the partial selections that no other one beats in memory and cost."""
    sums = list(used.T)
    if len(sums) == 1:
        return thinned(undominated(sums[0], costs), MAX_SELECTIONS)
    places = np.arange(len(costs))
    if len(costs) > MAX_SELECTIONS:
        # Too many for pairwise comparison: keep the best for each limit and for their sum.
        sums.append(used.sum(axis=1))
        fronts = [thinned(undominated(each, costs), MAX_SELECTIONS // len(sums)) for each in sums]
        places = np.unique(np.concatenate(fronts))
    return places[_undominated_rows(np.column_stack([used[places], costs[places]]))]


def _undominated_rows(rows: Integers) -> Indices:
    """Return the indices of the rows that no other row beats or equals in every column."""
    order = np.lexsort(rows.T)
    found = np.empty_like(rows)
    places: list[int] = []
    for place in order:
        if not (found[: len(places)] <= rows[place]).all(axis=1).any():
            found[len(places)] = rows[place]
            places.append(int(place))
    return np.array(places, dtype=np.int64)
