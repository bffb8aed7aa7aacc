"""Best distribution of a step's micro-batches over replicas of unequal speed."""

from collections.abc import Sequence
from functools import reduce
from math import gcd
from typing import Final, NamedTuple

from gpipe_hpc.settings import MicrobatchSplit

_LEAST_GAIN: Final = 0.1  # fraction of the slowest replica's time worth reporting


class Balance(NamedTuple):
    """Weights for `outer.weights`, and the fraction of the slowest replica's time they save."""

    weights: tuple[int, ...]
    gain: float


def balance(busy_s: Sequence[float], portions: MicrobatchSplit) -> Balance | None:
    """Return weights with which all replicas would end together; None if they would save little.

    `busy_s` is the computing time of each rank, by world rank, over any number of steps. A replica
    is as slow as its busiest rank; its time is assumed to be proportional to its micro-batches.
    """
    if not busy_s:
        return None
    size = len(busy_s) // len(portions.counts)
    slowest = [max(busy_s[r * size : (r + 1) * size]) for r in range(len(portions.counts))]
    if len(slowest) < 2 or portions.total < len(slowest) or min(slowest) <= 0:
        return None
    costs = [each / count for each, count in zip(slowest, portions.counts, strict=True)]
    counts = _divide(costs, portions.total)
    took = max(cost * count for cost, count in zip(costs, counts, strict=True))
    gain = 1 - took / max(slowest)
    if gain < _LEAST_GAIN:
        return None
    least = reduce(gcd, counts)
    return Balance(tuple(count // least for count in counts), gain)


def _divide(costs: Sequence[float], total: int) -> list[int]:
    """Divide `total` micro-batches, at least one each, so that the last replica ends earliest."""
    counts = [1] * len(costs)
    for _ in range(total - len(costs)):
        ends = [(count + 1) * cost for count, cost in zip(counts, costs, strict=True)]
        counts[ends.index(min(ends))] += 1
    return counts
