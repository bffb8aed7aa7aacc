"""Rings: each rank sends to the next and receives from the one before (Baidu, 2017).

All links carry something at all times, and a rank sends (n-1)/n of the vector in each half, the
least there can be; it takes n-1 steps a half, so rings suit long vectors and few ranks.
"""

from collections.abc import Iterator, Sequence

from gpipe_hpc.comm.collectives.plan import Place, Plan, Step, even_counts, moves, planned, spans_of


def ring_reduce_scatter(place: Place, counts: Sequence[int]) -> Plan:
    """Sum shard i at rank i; the other shards are left with partial sums.

    ```text
    n = 3        step 0      step 1
    rank 0       2 -> 1      1 -> 1
    rank 1       0 -> 2      2 -> 2      (shard -> to whom)
    rank 2       1 -> 0      0 -> 0
    ```
    """

    def steps() -> Iterator[Step]:
        n, i = place
        spans = spans_of(counts)
        for t in range(n - 1):
            out, into = spans[(i - 1 - t) % n], spans[(i - 2 - t) % n]
            yield Step(sends=moves((i + 1) % n, out), adds=moves((i - 1) % n, into))

    return planned(steps())


def ring_all_gather(place: Place, counts: Sequence[int]) -> Plan:
    """Give every rank all shards; rank i begins with shard i alone."""

    def steps() -> Iterator[Step]:
        n, i = place
        spans = spans_of(counts)
        for t in range(n - 1):
            out, into = spans[(i - t) % n], spans[(i - 1 - t) % n]
            yield Step(sends=moves((i + 1) % n, out), takes=moves((i - 1) % n, into))

    return planned(steps())


def ring_all_reduce(place: Place, count: int) -> Plan:
    """Reduce and scatter even shards, then gather them."""
    counts = even_counts(count, place.size)
    return ring_reduce_scatter(place, counts) + ring_all_gather(place, counts)
