"""Recursive halving and doubling: partners at distances that are powers of two.

They take about log2(n) steps. With n no power of two, the first ranks are folded into pairs: one of
each pair hands its vector to the other before and gets the result after, as MPICH does it.

Legend: p the greatest power of two within n; v the position among the p that take part.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpipe_hpc.comm.collectives.plan import (
    Place,
    Plan,
    Span,
    Step,
    even_counts,
    moves,
    planned,
    spans_of,
)


class Fold(NamedTuple):
    """How n ranks become p: of the first 2 (n-p), each even one is folded into the next."""

    size: int

    @property
    def num_kept(self) -> int:
        """Return p."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def num_steps(self) -> int:
        """Return log2(p)."""
        return self.size.bit_length() - 1

    @property
    def num_pairs(self) -> int:
        """Return n-p."""
        return self.size - self.num_kept

    def partner(self, i: int) -> int | None:
        """Return the other one of the pair of rank i; None if it is in none."""
        return i ^ 1 if i < 2 * self.num_pairs else None

    def is_folded(self, i: int) -> bool:
        """Say whether rank i takes no part itself."""
        return i < 2 * self.num_pairs and i % 2 == 0

    def kept(self, i: int) -> int:
        """Return v of a rank that takes part."""
        return i // 2 if i < 2 * self.num_pairs else i - self.num_pairs

    def rank(self, v: int) -> int:
        """Return the rank that takes part as v."""
        return 2 * v + 1 if v < self.num_pairs else v + self.num_pairs

    def shards(self, v: int) -> range:
        """Return whose shards v looks after: its own, and that of the rank folded into it."""
        return range(self.rank(v) - (v < self.num_pairs), self.rank(v) + 1)


def butterfly_all_reduce(place: Place, count: int) -> Plan:
    """Exchange the whole vector with partners ever nearer.

    Each element is summed in the order in which `rabenseifner_all_reduce` sums it, so the bits are
    the same: on four ranks (0 + 2) + (1 + 3).
    """
    steps = range(Fold(place.size).num_steps)
    return exchange_whole(place, count, [1 << step for step in reversed(steps)])


def exchange_whole(place: Place, count: int, distances: Sequence[int]) -> Plan:
    """Exchange the whole vector with partners at some distances, one after the other."""
    n, i = place
    fold, whole = Fold(n), Span(0, count)
    peers = [] if fold.is_folded(i) else [fold.rank(fold.kept(i) ^ each) for each in distances]
    core = planned(Step(sends=moves(peer, whole), adds=moves(peer, whole)) for peer in peers)
    return _folded_in(fold, i, whole) + core + _folded_out(fold, i, (whole,))


def rabenseifner_all_reduce(place: Place, count: int) -> Plan:
    """Reduce and scatter by halving, then gather by doubling (Rabenseifner, 2004)."""
    n, i = place
    fold, whole = Fold(n), Span(0, count)
    spans = spans_of(even_counts(count, fold.num_kept))
    core = () if fold.is_folded(i) else _halving(fold, i, spans) + doubling(fold, i, spans)
    return _folded_in(fold, i, whole) + core + _folded_out(fold, i, (whole,))


def halving_reduce_scatter(place: Place, counts: Sequence[int]) -> Plan:
    """Sum shard i at rank i: exchange half of what is left with partners ever nearer."""
    n, i = place
    fold, whole = Fold(n), Span(0, sum(counts))
    core = () if fold.is_folded(i) else _halving(fold, i, looked_after(fold, counts))
    return _folded_in(fold, i, whole) + core + _folded_out(fold, i, _own(fold, i, counts))


def looked_after(fold: Fold, counts: Sequence[int]) -> tuple[Span, ...]:
    """Return the elements of the shards that each v looks after."""
    shards = [fold.shards(v) for v in range(fold.num_kept)]
    return spans_of([sum(counts[each] for each in some) for some in shards])


def _own(fold: Fold, i: int, counts: Sequence[int]) -> tuple[Span, ...]:
    """Return the shard of the folded rank of this rank's pair."""
    partner = fold.partner(i)
    return () if partner is None else (spans_of(counts)[min(i, partner)],)


def _halving(fold: Fold, i: int, spans: Sequence[Span]) -> Plan:
    """Sum spans[v] at v; the vector is cut into one span for each v."""

    def steps() -> Iterator[Step]:
        v, first, last = fold.kept(i), 0, fold.num_kept
        while last - first > 1:
            middle = (first + last) // 2
            low, high = _joined(spans, first, middle), _joined(spans, middle, last)
            is_low = v < middle
            peer = fold.rank(v ^ (last - middle))
            yield Step(
                sends=moves(peer, high if is_low else low),
                adds=moves(peer, low if is_low else high),
            )
            first, last = (first, middle) if is_low else (middle, last)

    return planned(steps())


def doubling(fold: Fold, i: int, spans: Sequence[Span]) -> Plan:
    """Give every v all spans, of which it has its own."""

    def steps() -> Iterator[Step]:
        v, distance = fold.kept(i), 1
        while distance < fold.num_kept:
            here, there = (w // distance * distance for w in (v, v ^ distance))
            peer = fold.rank(v ^ distance)
            yield Step(
                sends=moves(peer, _joined(spans, here, here + distance)),
                takes=moves(peer, _joined(spans, there, there + distance)),
            )
            distance *= 2

    return () if fold.is_folded(i) else planned(steps())


def _joined(spans: Sequence[Span], first: int, last: int) -> Span:
    """Return the span over spans[first:last], which lie side by side."""
    return Span(spans[first].start, spans[last - 1].stop)


def _folded_in(fold: Fold, i: int, whole: Span) -> Plan:
    """Return the step in which a folded rank hands over its vector."""
    partner = fold.partner(i)
    if partner is None:
        return ()
    if fold.is_folded(i):
        return planned(iter([Step(sends=moves(partner, whole))]))
    return planned(iter([Step(adds=moves(partner, whole))]))


def _folded_out(fold: Fold, i: int, spans: Sequence[Span]) -> Plan:
    """Return the step in which a folded rank gets its part of the result."""
    partner = fold.partner(i)
    if partner is None:
        return ()
    if fold.is_folded(i):
        return planned(iter([Step(takes=moves(partner, *spans))]))
    return planned(iter([Step(sends=moves(partner, *spans))]))
