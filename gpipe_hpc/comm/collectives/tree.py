"""Binomial trees: in each round, twice as many ranks have the vector.

Few steps and the whole vector in each: for short vectors.
"""

from collections.abc import Iterator

from gpipe_hpc.comm.collectives.plan import (
    Place,
    Plan,
    Span,
    Step,
    even_counts,
    moves,
    planned,
    renamed,
    spans_of,
)
from gpipe_hpc.comm.collectives.ring import ring_all_gather


def binomial_broadcast(place: Place, root: int, count: int) -> Plan:
    """Give every rank the root's vector: in each round all that have it send it."""

    def steps() -> Iterator[Step]:
        n, i = place.size, (place.position - root) % place.size
        whole, distance = Span(0, count), 1
        while distance < n:
            if i < distance and i + distance < n:
                yield Step(sends=moves(i + distance, whole))
            elif distance <= i < 2 * distance:
                yield Step(takes=moves(i - distance, whole))
            distance *= 2

    return _from(root, place, planned(steps()))


def scatter_ring_broadcast(place: Place, root: int, count: int) -> Plan:
    """Scatter shards along a binomial tree, then gather them along a ring (van de Geijn)."""
    size, i = place.size, (place.position - root) % place.size
    counts = even_counts(count, size)
    gather = ring_all_gather(Place(size, i), counts)
    return _from(root, place, _scatter(Place(size, i), counts) + gather)


def _scatter(place: Place, counts: tuple[int, ...]) -> Plan:
    """Give rank i shard i of rank 0's vector: who holds a range hands on its upper half."""

    def steps() -> Iterator[Step]:
        n, i = place
        spans, first, last = spans_of(counts), 0, n
        while last - first > 1:
            middle = (first + last + 1) // 2
            upper = Span(spans[middle].start, spans[last - 1].stop)
            if i == first:
                yield Step(sends=moves(middle, upper))
            elif i == middle:
                yield Step(takes=moves(first, upper))
            first, last = (first, middle) if i < middle else (middle, last)

    return planned(steps())


def _from(root: int, place: Place, plan: Plan) -> Plan:
    """Return a plan for root 0 as one for another root."""
    return renamed(plan, lambda peer: (peer + root) % place.size)
