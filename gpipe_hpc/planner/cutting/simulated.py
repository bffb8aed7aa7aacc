"""Find faster partitions by simulation if ranks hold several stages (looped, V-shaped, mirrored).

The load of a rank is then a sum over distant stages, and the step time also depends on how even the
stages are. No exact algorithm is known, and balancing loads alone slows some steps down. So several
partitions between even stages and even loads are simulated, followed by a local search from the
best one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Final

from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.pins import EndRanges
from gpipe_hpc.schedule import Placement

_EVEN_STAGES: Final = (0.0, 0.4, 0.6, 0.8, 0.9)
"""Weights of the largest stage against the largest load, from even loads to even stages."""

_GAIN: Final = 1e-3  # smallest relative gain in time that counts
_TOGETHER: Final = 24  # maximum number of consecutive ends that move together
_MOST_PRICED: Final = 1_000_000  # limit of evaluated cuts, times stages, for even loads

_Ends = tuple[int, ...]
_Price = tuple[float, float]


def has_shared_ranks(placement: Placement) -> bool:
    """Return whether some rank holds several stages."""
    return any(len(placement.stages_of(rank)) > 1 for rank in range(placement.num_ranks))


def faster_cut(
    partition: Partition, placement: Placement, time_of: Callable[[Partition], float], most: int
) -> Partition:
    """Return the fastest partition found, or `partition` itself if none is faster.

    `time_of` returns the step time of a partition and is called at most `most` times, after the
    first few partitions. The layers of `partition.pins` stay on their stages.
    """
    num_layers, num_stages = len(partition.costs), placement.num_stages
    where = EndRanges.where(partition.pins, num_layers, num_stages)
    times: dict[_Ends, float] = {}

    def took(ends: _Ends) -> float:
        if ends not in times:
            times[ends] = time_of(_with_ends(partition, ends))
        return times[ends]

    first = (0, *accumulate(partition.counts))
    starts = [first, *_evened(partition, placement, where)]
    best = min(starts, key=took)
    is_better = True
    while is_better and len(times) < most:
        is_better = False
        for moved in _near(best, where):
            if len(times) >= most:
                break
            if took(moved) < (1 - _GAIN) * took(best):
                best, is_better = moved, True
                break
    gained = took(best) < (1 - _GAIN) * took(first)
    return _with_ends(partition, best) if gained else partition


def _with_ends(partition: Partition, ends: _Ends) -> Partition:
    return partition._replace(counts=tuple(end - start for start, end in pairwise(ends)))


def _evened(partition: Partition, placement: Placement, where: EndRanges) -> Iterator[_Ends]:
    """Yield partitions with balanced rank loads, with stage sizes from arbitrary to even."""
    paces = partition.rank_paces or (1.0,) * placement.num_ranks
    holders = [placement.holders(stage) for stage in range(placement.num_stages)]
    prefix = [0.0, *accumulate(partition.costs)]
    each = placement.num_stages / placement.num_ranks

    def price(weight: float, ends: _Ends) -> _Price:
        due, largest = [0.0] * placement.num_ranks, 0.0
        for (start, end), ranks in zip(pairwise(ends), holders, strict=True):
            cost = prefix[end] - prefix[start]
            largest = max(largest, cost)
            for rank in ranks:
                due[rank] += cost * paces[rank] / len(ranks)
        return max(*due, weight * each * largest), sum(load * load for load in due)

    first = (0, *accumulate(partition.counts))
    for weight in _EVEN_STAGES:
        left = _MOST_PRICED // len(_EVEN_STAGES) // placement.num_stages
        ends, least, is_better = first, price(weight, first), True
        while is_better:
            is_better = False
            for moved in islice(_moves(ends, where), left):
                left -= 1
                its = price(weight, moved)
                if its < least:
                    ends, least, is_better = moved, its, True
                    break
        yield ends


def _moves(ends: _Ends, where: EndRanges) -> Iterator[_Ends]:
    """Yield partitions with one stage end moved by a power of two, or several ends by up to two.

    Ends in the way are pushed along. Moving consecutive ends exchanges a layer of a distant stage
    for one of this stage.
    """
    last = len(ends) - 1
    steps = [1 << power for power in range(ends[-1].bit_length())]
    for k in range(1, last):
        for step in steps:
            yield from _pushed(ends, {k: ends[k] + step}, where)
            yield from _pushed(ends, {k: ends[k] - step}, where)
    for k in range(1, last):
        for other in range(k + 1, min(last, k + _TOGETHER)):
            for step in (-2, -1, 1, 2):
                yield from _pushed(ends, {i: ends[i] + step for i in range(k, other + 1)}, where)


def _near(ends: _Ends, where: EndRanges) -> Iterator[_Ends]:
    """Yield partitions with one stage end moved by one or two layers, or two ends by one."""
    for k in range(1, len(ends) - 1):
        for step in (1, -1, 2, -2):
            yield from _pushed(ends, {k: ends[k] + step}, where)
        if k + 1 < len(ends) - 1:
            for step, other in ((1, 1), (-1, -1), (-1, 1), (1, -1)):
                to = {k: ends[k] + step, k + 1: ends[k + 1] + other}
                yield from _pushed(ends, to, where)


def _pushed(ends: Sequence[int], to: Mapping[int, int], where: EndRanges) -> Iterator[_Ends]:
    """Yield the stage ends with some set to new values and others pushed along, if valid."""
    moved = [to.get(k, end) for k, end in enumerate(ends)]
    for k in range(1, len(ends) - 1):
        if k not in to:
            moved[k] = max(moved[k], moved[k - 1] + 1)
    for k in reversed(range(1, len(ends) - 1)):
        if k not in to:
            moved[k] = min(moved[k], moved[k + 1] - 1)
    in_order = all(a < b for a, b in pairwise(moved))
    if in_order and all(a <= b <= c for a, b, c in zip(where.low, moved, where.high, strict=True)):
        yield tuple(moved)
