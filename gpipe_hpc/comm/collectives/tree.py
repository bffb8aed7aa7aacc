"""Plans along binomial trees: the number of ranks that have the vector doubles in each round.

Few steps, each of which sends the whole vector, so trees suit short vectors.
"""

from collections.abc import Iterator

from gpipe_hpc.comm.collectives.plan import (
    ElementSpan,
    Plan,
    PlanPosition,
    PlanStep,
    even_counts,
    moves,
    planned,
    renamed,
    spans_of,
)
from gpipe_hpc.comm.collectives.ring import ring_all_gather


def binomial_broadcast(place: PlanPosition, root: int, count: int) -> Plan:
    """Plan a broadcast in which every rank that has the vector sends it to one more per round."""

    def steps() -> Iterator[PlanStep]:
        n, i = place.size, (place.position - root) % place.size
        whole, distance = ElementSpan(0, count), 1
        while distance < n:
            if i < distance and i + distance < n:
                yield PlanStep(sends=moves(i + distance, whole))
            elif distance <= i < 2 * distance:
                yield PlanStep(takes=moves(i - distance, whole))
            distance *= 2

    return _with_root(root, place, planned(steps()))


def scatter_ring_broadcast(place: PlanPosition, root: int, count: int) -> Plan:
    """Plan a broadcast as a binomial scatter and a ring all-gather (van de Geijn)."""
    size, i = place.size, (place.position - root) % place.size
    counts = even_counts(count, size)
    gather = ring_all_gather(PlanPosition(size, i), counts)
    return _with_root(root, place, _scatter(PlanPosition(size, i), counts) + gather)


def _scatter(place: PlanPosition, counts: tuple[int, ...]) -> Plan:
    """Plan a scatter of rank 0's vector: a rank with several shards sends on their upper half."""

    def steps() -> Iterator[PlanStep]:
        n, i = place
        spans, first, last = spans_of(counts), 0, n
        while last - first > 1:
            middle = (first + last + 1) // 2
            upper = ElementSpan(spans[middle].start, spans[last - 1].stop)
            if i == first:
                yield PlanStep(sends=moves(middle, upper))
            elif i == middle:
                yield PlanStep(takes=moves(first, upper))
            first, last = (first, middle) if i < middle else (middle, last)

    return planned(steps())


def _with_root(root: int, place: PlanPosition, plan: Plan) -> Plan:
    """Return a plan made for root 0 with its ranks shifted to another root."""
    return renamed(plan, lambda peer: (peer + root) % place.size)
