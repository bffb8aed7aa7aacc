"""How much more the fullest rank of a cut has to do than that of the best cut, at most.

Where a rank holds one stage the best cut is known. Where it holds several (looped, V-shaped,
mirrored) no cut leaves the fullest rank less than a bound: that of layers which may go to any
ranks, in any order. What ranks may hold is left out of it, which only lowers the bound.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from gpipe_hpc.planning.cutting.partition import Partition
from gpipe_hpc.schedule import Placement


class Distance(NamedTuple):
    """How far the fullest rank of a cut is from the least there can be, as a share of that.

    `is_exact`: some cut has the least; else it is a bound that perhaps none reaches.
    """

    share: float
    is_exact: bool

    def text(self) -> str:
        """Say it in one line."""
        if self.share < 5e-4:
            return "no cut leaves the fullest rank less to do"
        most = "" if self.is_exact else "at most "
        return (
            f"the fullest rank has {most}{100 * self.share:.1f} % more to do than in the best cut"
        )


def distance(partition: Partition, placement: Placement, costs: Sequence[float]) -> Distance | None:
    """Return how far a cut is from the best one for these costs of layers; None where all are 0."""
    holders = [len(placement.holders(stage)) for stage in range(placement.num_stages)]
    paces = partition.rank_paces or (1.0,) * placement.num_ranks
    has_one_each = placement.num_stages == placement.num_ranks == sum(holders)
    is_exact = has_one_each or partition.num_ranks is not None
    if is_exact:
        best = partition._replace(costs=tuple(costs))
        own = _busiest(partition, costs)
        least = _busiest(best.cut_anew(placement.num_stages, partition.num_ranks), costs)
    else:
        own = fullest(partition.counts, placement, costs, paces)
        least = least_of_fullest(costs, holders, paces)
    return Distance(max(0.0, own / least - 1), is_exact) if least else None


def _busiest(partition: Partition, costs: Sequence[float]) -> float:
    """Return what the busiest rank has to do where each holds one stage, alone or with others."""
    ones = [1] * len(partition.counts)
    copies, paces = partition.copies or ones, partition.stage_paces or ones
    amounts = _of_stages(partition.counts, costs)
    return max(a * p / n for a, p, n in zip(amounts, paces, copies, strict=True))


def fullest(
    counts: Sequence[int], placement: Placement, costs: Sequence[float], paces: Sequence[float]
) -> float:
    """Return what the fullest rank has to do; those that hold a stage share it evenly."""
    amounts = _of_stages(counts, costs)
    return max(
        paces[rank] * sum(amounts[s] / len(placement.holders(s)) for s in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    )


def _of_stages(counts: Sequence[int], costs: Sequence[float]) -> list[float]:
    ends = [0, *accumulate(counts)]
    return [sum(costs[end - count : end]) for end, count in zip(ends[1:], counts, strict=True)]


def least_of_fullest(
    costs: Sequence[float], holders: Sequence[int], paces: Sequence[float]
) -> float:
    """Return what the fullest rank has to do at least, in whatever cut.

    `holders`: how many ranks hold each stage; `paces` are those of ranks. All the work over the
    speed of all ranks; and of the dearest layers, more than there are ranks, some rank has several.
    """
    most = max(holders)
    even = sum(costs) / sum(1 / pace for pace in paces)
    if min(holders) < most:  # a layer is at best on as many ranks as can be
        return max(even, max(costs) / most * min(paces))
    # Each layer is so many parts, on ranks of which each has one.
    parts = sorted((cost / most for cost in costs for _ in range(most)), reverse=True)
    return max(even, _least_of_parts(parts, paces))


def _least_of_parts(parts: Sequence[float], paces: Sequence[float]) -> float:
    """Return what the fullest rank has at least of parts that may go to any rank, dearest first."""
    if len(set(paces)) == 1:
        # Of the m K + 1 dearest, some of K ranks has m + 1: the cheapest of them at least.
        steps = range(0, (len(parts) - 1) // len(paces) + 1)
        sums = (sum(parts[m * len(paces) - m : m * len(paces) + 1]) for m in steps)
        return paces[0] * max(sums)
    # Parts as cheap as the j-th dearest: the fastest way to work off j of them.
    due = [(pace, pace) for pace in paces]
    heapify(due)
    least = 0.0
    for part in parts:
        took, pace = heappop(due)
        least = max(least, took * part)
        heappush(due, (took + pace, pace))
    return least
