"""How the micro-batches of a step would be divided best over replicas of unequal speed."""

from collections.abc import Sequence
from functools import reduce
from math import gcd
from typing import Any, Final, NamedTuple

from gpipe_hpc.data_parallel import MicrobatchSplit

_LEAST_GAIN: Final = 0.1  # of the slowest replica's time, to speak of


class Balance(NamedTuple):
    """Weights for `outer.weights`, and the share of the slowest replica's time that they save."""

    weights: tuple[int, ...]
    gain: float

    def told(self) -> dict[str, Any]:
        """Return it as summary.json has it."""
        return {"weights": list(self.weights), "gain": self.gain}


def balance(busy_s: Sequence[float], portions: MicrobatchSplit) -> Balance | None:
    """Return what would let all replicas end together; None if it would save little.

    `busy_s`: how long each rank computed, by world rank, over any number of steps. A replica is as
    fast as its busiest rank; a micro-batch is taken to cost it as much as each did.
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
    """Return how many of `total` each is to run so that the last ends soonest, one at least."""
    counts = [1] * len(costs)
    for _ in range(total - len(costs)):
        ends = [(count + 1) * cost for count, cost in zip(counts, costs, strict=True)]
        counts[ends.index(min(ends))] += 1
    return counts
