"""One choice for each of several stages that share the memory of ranks."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from gpipe_hpc.planning.choices import Choices, Indices, Integers, thinned, undominated

MAX_SELECTIONS: Final = 2048
"""Most partial selections that are followed; all of them, where there are no more."""

_MAX_PICKS: Final = 512  # of a stage among several


class Limit(NamedTuple):
    """At one time of a rank: sum over stages of `kept` x what the stage keeps, within `room`."""

    rank: int
    kept: Mapping[int, int]
    room: float


def select(
    choices: Mapping[int, Choices], runs: Mapping[int, int], limits: Sequence[Limit]
) -> dict[int, int]:
    """Return the number of the choice of each stage: the cheapest selection within all limits.

    A stage's cost counts as often as it is run again. One selection at least must be within.
    """
    stages = list(choices)
    factors = np.array([[limit.kept.get(s, 0) for s in stages] for limit in limits], dtype=np.int64)
    factors = factors.reshape(len(limits), len(stages))
    least = [int(choices[stage].kept_bytes[0]) for stage in stages]
    room = np.array([limit.room for limit in limits])
    used = np.zeros((1, len(limits)), dtype=np.int64)
    costs = np.zeros(1, dtype=np.int64)
    trail: list[tuple[Indices, Indices]] = []
    for place, stage in enumerate(stages):
        own = choices[stage]
        picks = np.arange(len(own.costs))
        if len(stages) > 1:
            picks = thinned(picks, _MAX_PICKS)
        used = used[:, None, :] + own.kept_bytes[picks][None, :, None] * factors[:, place]
        costs = (costs[:, None] + runs[stage] * own.costs[picks][None, :]).ravel()
        used = used.reshape(len(costs), len(limits))
        rest = factors[:, place + 1 :] @ np.array(least[place + 1 :], dtype=np.int64)
        places = np.flatnonzero((used + rest <= room).all(axis=1))
        assert len(places), "nothing is within the limits, though the least was found to be"
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
    """Return the places of the partial selections that no other one beats."""
    sums = list(used.T)
    if len(sums) == 1:
        return thinned(undominated(sums[0], costs), MAX_SELECTIONS)
    places = np.arange(len(costs))
    if len(costs) > MAX_SELECTIONS:
        # Too many to compare each with each: those that are best for one limit, or for the sum.
        sums.append(used.sum(axis=1))
        fronts = [thinned(undominated(each, costs), MAX_SELECTIONS // len(sums)) for each in sums]
        places = np.unique(np.concatenate(fronts))
    return places[_undominated_rows(np.column_stack([used[places], costs[places]]))]


def _undominated_rows(rows: Integers) -> Indices:
    """Return the places of rows of which no other is as small in all columns."""
    order = np.lexsort(rows.T)
    found = np.empty_like(rows)
    places: list[int] = []
    for place in order:
        if not (found[: len(places)] <= rows[place]).all(axis=1).any():
            found[len(places)] = rows[place]
            places.append(int(place))
    return np.array(places, dtype=np.int64)
