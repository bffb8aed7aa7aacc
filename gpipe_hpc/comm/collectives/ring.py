"""Ring plans: each rank sends to the next and receives from the previous one (Baidu, 2017).

All links are busy at all times, and a rank sends (n-1)/n of the vector in each half, which is
optimal. Each half takes n-1 steps, so rings suit long vectors and few ranks.
"""

from collections.abc import Iterator, Sequence

from gpipe_hpc.comm.collectives.plan import (
    Plan,
    PlanPosition,
    PlanStep,
    even_counts,
    moves,
    planned,
    spans_of,
)


def ring_reduce_scatter(place: PlanPosition, counts: Sequence[int]) -> Plan:
    """Plan a reduce-scatter with shard i at rank i; other shards are left with partial sums.

    ```text
    n = 3        step 0      step 1
    rank 0       2 -> 1      1 -> 1
    rank 1       0 -> 2      2 -> 2      (shard -> destination rank)
    rank 2       1 -> 0      0 -> 0
    ```
    """

    def steps() -> Iterator[PlanStep]:
        n, i = place
        spans = spans_of(counts)
        for t in range(n - 1):
            out, into = spans[(i - 1 - t) % n], spans[(i - 2 - t) % n]
            yield PlanStep(sends=moves((i + 1) % n, out), adds=moves((i - 1) % n, into))

    return planned(steps())


def ring_all_gather(place: PlanPosition, counts: Sequence[int]) -> Plan:
    """Plan an all-gather of all shards; rank i starts with shard i."""

    def steps() -> Iterator[PlanStep]:
        n, i = place
        spans = spans_of(counts)
        for t in range(n - 1):
            out, into = spans[(i - t) % n], spans[(i - 1 - t) % n]
            yield PlanStep(sends=moves((i + 1) % n, out), takes=moves((i - 1) % n, into))

    return planned(steps())


def ring_all_reduce(place: PlanPosition, count: int) -> Plan:
    """Plan a reduce-scatter of equal shards and an all-gather."""
    counts = even_counts(count, place.size)
    return ring_reduce_scatter(place, counts) + ring_all_gather(place, counts)
