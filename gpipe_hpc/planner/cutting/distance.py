"""How much more the fullest rank of a cut has to do than that of the best cut, at most.

Where a rank holds one stage the best cut is known. Where it holds several (looped, V-shaped,
mirrored) no cut leaves the fullest rank less than a bound: that of layers which may go to any of
the ranks that hold a stage they may be on. What ranks may hold is left out of it, which only lowers
the bound. Cuts whose stages all have layers are compared; of others only one by hand is looked at.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.pins import Ends, Pins
from gpipe_hpc.schedule import Placement


class Distance(NamedTuple):
    """How far the fullest rank of a cut is from the least there can be, as a share of that.

    `is_exact`: some cut has the least; else it is a bound that perhaps none reaches.
    """

    share: float
    is_exact: bool

    def cell(self) -> str:
        """Say it as a cell of a table."""
        return f"{'' if self.is_exact or self.is_none else '<= '}{100 * self.share:.1f} %"

    @property
    def is_none(self) -> bool:
        """Say whether it is too small to be told of."""
        return self.share < 5e-4

    def text(self) -> str:
        """Say it in one line."""
        if self.is_none:
            return "no cut leaves the fullest rank less to do"
        most = "" if self.is_exact else "at most "
        return (
            f"the fullest rank has {most}{100 * self.share:.1f} % more to do than in the best cut"
        )


def distance(partition: Partition, placement: Placement, costs: Sequence[float]) -> Distance | None:
    """Return how far a cut is from the best one that holds its pins, for these costs of layers.

    None where all costs are 0, and where there are more stages than layers.
    """
    if placement.num_stages > len(costs):
        return None
    paces = partition.rank_paces or (1.0,) * placement.num_ranks
    num_held = sum(len(placement.holders(stage)) for stage in range(placement.num_stages))
    has_one_each = placement.num_stages == placement.num_ranks == num_held
    is_exact = has_one_each or partition.num_ranks is not None
    if is_exact:
        best = partition._replace(costs=tuple(costs))
        own = _busiest(partition, costs)
        least = _busiest(best.cut_anew(placement.num_stages, partition.num_ranks), costs)
    else:
        own = fullest(partition.counts, placement, costs, paces)
        least = least_of_fullest(costs, placement, paces, partition.pins)
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
    costs: Sequence[float], placement: Placement, paces: Sequence[float], pins: Pins = ()
) -> float:
    """Return what the fullest rank has to do at least, in whatever cut that holds the pins.

    `paces` are those of ranks. A lower bound: with `Ends` each layer is on one of some stages in
    every such cut, so the layers that only some ranks may have are work of these alone, and the
    fullest of them, which is no fuller than the fullest of all, has at least `_least_of_some` of
    it. And of these stages the best one for a layer leaves its ranks `_least_with` at least.
    """
    ends = Ends.where(pins, len(costs), placement.num_stages)
    spans = [
        range(bisect_right(ends.high, layer) - 1, bisect_right(ends.low, layer))
        for layer in range(len(costs))
    ]
    return max(
        _least_with(costs, placement, paces, ends, spans),
        *(
            _least_of_some([costs[i] for i in layers], holders, [paces[r] for r in ranks])
            for layers, holders, ranks in _groups(placement, spans, pins)
        ),
    )


def _least_with(
    costs: Sequence[float],
    placement: Placement,
    paces: Sequence[float],
    ends: Ends,
    spans: Sequence[range],
) -> float:
    """Return what the fullest rank has at least for the sake of one layer, whichever asks most.

    A stage has all layers between its latest start, its earliest end, and one that is on it. Each
    other stage of a rank has those between the first two, or the cheapest it may have if they are
    none, as no stage is empty. Those that hold a stage share it evenly.
    """
    low, high = ends
    prefix = [0.0, *accumulate(costs)]
    least = []
    for stage in range(placement.num_stages):
        cheapest = min(costs[low[stage] : high[stage + 1]])
        own = costs[high[stage] : low[stage + 1]] or [cheapest]
        least.append(sum(own) / len(placement.holders(stage)))
    of_ranks = [sum(least[s] for s in placement.stages_of(r)) for r in range(placement.num_ranks)]

    def fullest_with(layer: int, stage: int) -> float:
        start, end = min(layer, high[stage]), max(layer + 1, low[stage + 1])
        holders = placement.holders(stage)
        more = (prefix[end] - prefix[start]) / len(holders) - least[stage]
        return max(paces[rank] * (of_ranks[rank] + more) for rank in holders)

    most = 0.0
    for layer, span in enumerate(spans):
        # Where one of its stages asks for no more, the others need not be looked at.
        if all(fullest_with(layer, stage) > most for stage in span):
            most = min(fullest_with(layer, stage) for stage in span)
    return most


def _groups(
    placement: Placement, spans: Sequence[range], pins: Pins
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield layers that only some ranks may have, how many ranks hold such stages, those ranks.

    `spans`: the stages that each layer may be on. The groups are all ranks, and those of the stages
    from one that has a pin to another.
    """
    num_stages = placement.num_stages
    marks = sorted({0, num_stages - 1, *(pin.stage % num_stages for pin in pins)})
    several = {
        frozenset(r for stage in range(first, last + 1) for r in placement.holders(stage))
        for at, first in enumerate(marks)
        for last in marks[at:]
    }
    for ranks in several:
        held = [ranks.issuperset(placement.holders(stage)) for stage in range(num_stages)]
        before = [0, *accumulate(held)]
        layers = [
            layer
            for layer, span in enumerate(spans)
            if before[span.stop] - before[span.start] == len(span)
        ]
        holders = [len(placement.holders(stage)) for stage in range(num_stages) if held[stage]]
        if layers:
            yield layers, holders, sorted(ranks)


def _least_of_some(costs: Sequence[float], holders: Sequence[int], paces: Sequence[float]) -> float:
    """Return what the fullest of some ranks has at least of layers that no other rank may have.

    `holders`: how many ranks hold each of their stages. All the work over the speed of these ranks;
    and of the dearest layers, more than there are ranks, some rank has several.
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
