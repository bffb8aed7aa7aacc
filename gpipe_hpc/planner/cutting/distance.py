"""Bound how much more work the most loaded rank has than with the best partition.

If each rank holds one stage, the best partition is known. If ranks hold several stages (looped,
V-shaped or mirrored placements), a lower bound is computed by letting each layer run on any rank
that holds a stage to which it may belong. Memory limits are ignored, which only lowers the bound.
Only partitions without empty stages are compared.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.pins import EndRanges, Pins
from gpipe_hpc.schedule import Placement


class Distance(NamedTuple):
    """Excess of the most loaded rank over the smallest possible load, as a share of that load.

    `is_exact`: some partition reaches the smallest load; otherwise that load is a lower bound.
    """

    share: float
    is_exact: bool

    def cell(self) -> str:
        """Format the excess for a table cell, such as ``<= 1.5 %``."""
        return f"{'' if self.is_exact or self.is_none else '<= '}{100 * self.share:.1f} %"

    @property
    def is_none(self) -> bool:
        """Return whether the excess is negligible."""
        return self.share < 5e-4

    def text(self) -> str:
        """Format the excess as one sentence."""
        if self.is_none:
            return "no cut gives the most loaded rank less work"
        most = "" if self.is_exact else "at most "
        return (
            f"the most loaded rank has {most}{100 * self.share:.1f} % more work than in the best "
            f"cut"
        )


def distance(partition: Partition, placement: Placement, costs: Sequence[float]) -> Distance | None:
    """Return how far a partition is from the best one with the same pins, for given layer costs.

    Returns None if all costs are 0, or if there are more stages than layers.
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
    """Return the load of the busiest rank if no rank holds several stages."""
    ones = [1] * len(partition.counts)
    copies, paces = partition.copies or ones, partition.stage_paces or ones
    amounts = _of_stages(partition.counts, costs)
    return max(a * p / n for a, p, n in zip(amounts, paces, copies, strict=True))


def fullest(
    counts: Sequence[int], placement: Placement, costs: Sequence[float], paces: Sequence[float]
) -> float:
    """Return the load of the most loaded rank; the ranks of a stage share its work evenly."""
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
    """Return a lower bound of the most loaded rank's work over all partitions within the pins.

    `paces` are slowdowns of ranks. By `EndRanges`, each layer is on one of a range of stages in
    every such partition. So layers that only some ranks may hold are work of these ranks alone,
    which `_least_of_some` bounds; and the best of a layer's stages gives its ranks at least the
    load of `_least_with`.
    """
    ends = EndRanges.where(pins, len(costs), placement.num_stages)
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
    ends: EndRanges,
    spans: Sequence[range],
) -> float:
    """Return the largest lower bound that any single layer implies for the most loaded rank.

    A stage contains all layers between its latest start and its earliest end, and one layer placed
    on it. Each other stage of a rank contains the layers between its own latest start and earliest
    end, or at least its cheapest possible layer, because no stage is empty. The ranks of a stage
    share it evenly.
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
        # If one of its stages does not raise the bound, the others need not be evaluated.
        if all(fullest_with(layer, stage) > most for stage in span):
            most = min(fullest_with(layer, stage) for stage in span)
    return most


def _groups(
    placement: Placement, spans: Sequence[range], pins: Pins
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield sets of layers that only some ranks may hold, with holders per stage, and those ranks.

    `spans` are the stages that each layer may be on. The sets belong to all ranks, and to the ranks
    of stages between two pinned ones.
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
    """Return a lower bound of the most loaded rank's work on layers that only these ranks may hold.

    It is the larger of two bounds: total work divided by total speed, and one from the most
    expensive layers (of more layers than ranks, some rank has several). `holders`: ranks per stage.
    """
    most = max(holders)
    even = sum(costs) / sum(1 / pace for pace in paces)
    if min(holders) < most:  # in the best case a layer is on the stage with most ranks
        return max(even, max(costs) / most * min(paces))
    # Each layer has `most` equal parts, one per rank of its stage.
    parts = sorted((cost / most for cost in costs for _ in range(most)), reverse=True)
    return max(even, _least_of_parts(parts, paces))


def _least_of_parts(parts: Sequence[float], paces: Sequence[float]) -> float:
    """Return a lower bound of the largest load if parts (descending) may go to any rank."""
    if len(set(paces)) == 1:
        # Of the m K + 1 largest parts, one of K ranks has m + 1, at least the smallest of them.
        steps = range(0, (len(parts) - 1) // len(paces) + 1)
        sums = (sum(parts[m * len(paces) - m : m * len(paces) + 1]) for m in steps)
        return paces[0] * max(sums)
    # Bound for each j: the fastest schedule of j parts as small as the j-th largest.
    due = [(pace, pace) for pace in paces]
    heapify(due)
    least = 0.0
    for part in parts:
        took, pace = heappop(due)
        least = max(least, took * part)
        heappush(due, (took + pace, pace))
    return least
