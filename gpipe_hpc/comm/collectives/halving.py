"""Plans by recursive halving and doubling: exchange with partners at distances 1, 2, 4, 8, ...

They take about log2(n) steps. If n is no power of two, some of the first ranks are paired: one of
each pair sends its vector to the other first and receives the result at the end, as in MPICH.

Legend: p is the greatest power of two up to n; v is the position among the p participating ranks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpipe_hpc.comm.collectives.plan import (
    ElementSpan,
    Plan,
    PlanPosition,
    PlanStep,
    even_counts,
    moves,
    planned,
    spans_of,
)


class Fold(NamedTuple):
    """Mapping of n ranks to p participating ones: n-p pairs of ranks take part as one rank each.

    Only the second rank of a pair takes part; it also contributes the vector of the first one.
    """

    size: int

    @property
    def num_kept(self) -> int:
        """Return p, the number of participating ranks."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def num_steps(self) -> int:
        """Return log2(p), the number of steps."""
        return self.size.bit_length() - 1

    @property
    def num_pairs(self) -> int:
        """Return n-p, the number of pairs."""
        return self.size - self.num_kept

    def partner(self, i: int) -> int | None:
        """Return the other rank of the pair of rank i; None if it is in no pair."""
        return i ^ 1 if i < 2 * self.num_pairs else None

    def is_folded(self, i: int) -> bool:
        """Return whether rank i is represented by its partner and takes no part itself."""
        return i < 2 * self.num_pairs and i % 2 == 0

    def kept(self, i: int) -> int:
        """Return the position v of participating rank i."""
        return i // 2 if i < 2 * self.num_pairs else i - self.num_pairs

    def rank(self, v: int) -> int:
        """Return the rank at position v among the participating ranks."""
        return 2 * v + 1 if v < self.num_pairs else v + self.num_pairs

    def shards(self, v: int) -> range:
        """Return the ranks whose shards position v reduces: its own and the represented rank."""
        return range(self.rank(v) - (v < self.num_pairs), self.rank(v) + 1)


def butterfly_all_reduce(place: PlanPosition, count: int) -> Plan:
    """All-reduce by exchanging the whole vector with partners at decreasing distances.

    Each element is summed in the same order as in `rabenseifner_all_reduce`, so both are bitwise
    equal: on four ranks (0 + 2) + (1 + 3).
    """
    steps = range(Fold(place.size).num_steps)
    return exchange_full(place, count, [1 << step for step in reversed(steps)])


def exchange_full(place: PlanPosition, count: int, distances: Sequence[int]) -> Plan:
    """All-reduce by exchanging the whole vector with partners at the given distances, in order."""
    n, i = place
    fold, whole = Fold(n), ElementSpan(0, count)
    peers = [] if fold.is_folded(i) else [fold.rank(fold.kept(i) ^ each) for each in distances]
    core = planned(PlanStep(sends=moves(peer, whole), adds=moves(peer, whole)) for peer in peers)
    return _fold_in(fold, i, whole) + core + _fold_out(fold, i, (whole,))


def rabenseifner_all_reduce(place: PlanPosition, count: int) -> Plan:
    """All-reduce as halving reduce-scatter and doubling all-gather (Rabenseifner, 2004)."""
    n, i = place
    fold, whole = Fold(n), ElementSpan(0, count)
    spans = spans_of(even_counts(count, fold.num_kept))
    core = () if fold.is_folded(i) else _halving(fold, i, spans) + doubling(fold, i, spans)
    return _fold_in(fold, i, whole) + core + _fold_out(fold, i, (whole,))


def halving_reduce_scatter(place: PlanPosition, counts: Sequence[int]) -> Plan:
    """Reduce-scatter with shard i at rank i by exchanging halves of the remaining vector."""
    n, i = place
    fold, whole = Fold(n), ElementSpan(0, sum(counts))
    core = () if fold.is_folded(i) else _halving(fold, i, reduced_spans(fold, counts))
    return _fold_in(fold, i, whole) + core + _fold_out(fold, i, _partner_shard(fold, i, counts))


def reduced_spans(fold: Fold, counts: Sequence[int]) -> tuple[ElementSpan, ...]:
    """Return, for each position v, the span of the vector that it reduces, including its pair's."""
    shards = [fold.shards(v) for v in range(fold.num_kept)]
    return spans_of([sum(counts[each] for each in some) for some in shards])


def _partner_shard(fold: Fold, i: int, counts: Sequence[int]) -> tuple[ElementSpan, ...]:
    """Return the span of the first rank of rank i's pair, in a tuple; empty if i is in no pair."""
    partner = fold.partner(i)
    return () if partner is None else (spans_of(counts)[min(i, partner)],)


def _halving(fold: Fold, i: int, spans: Sequence[ElementSpan]) -> Plan:
    """Plan a reduce-scatter of spans[v] to position v, by halving the distance to the partner."""

    def steps() -> Iterator[PlanStep]:
        v, first, last = fold.kept(i), 0, fold.num_kept
        while last - first > 1:
            middle = (first + last) // 2
            low, high = _joined(spans, first, middle), _joined(spans, middle, last)
            is_low = v < middle
            peer = fold.rank(v ^ (last - middle))
            yield PlanStep(
                sends=moves(peer, high if is_low else low),
                adds=moves(peer, low if is_low else high),
            )
            first, last = (first, middle) if is_low else (middle, last)

    return planned(steps())


def doubling(fold: Fold, i: int, spans: Sequence[ElementSpan]) -> Plan:
    """Plan an all-gather among participating ranks, by doubling the distance to the partner.

    Position v starts with spans[v].
    """

    def steps() -> Iterator[PlanStep]:
        v, distance = fold.kept(i), 1
        while distance < fold.num_kept:
            here, there = (w // distance * distance for w in (v, v ^ distance))
            peer = fold.rank(v ^ distance)
            yield PlanStep(
                sends=moves(peer, _joined(spans, here, here + distance)),
                takes=moves(peer, _joined(spans, there, there + distance)),
            )
            distance *= 2

    return () if fold.is_folded(i) else planned(steps())


def _joined(spans: Sequence[ElementSpan], first: int, last: int) -> ElementSpan:
    """Return the span that covers the adjacent spans[first:last]."""
    return ElementSpan(spans[first].start, spans[last - 1].stop)


def _fold_in(fold: Fold, i: int, whole: ElementSpan) -> Plan:
    """Plan the initial step of a pair: the first rank sends its vector, the second one adds it."""
    partner = fold.partner(i)
    if partner is None:
        return ()
    if fold.is_folded(i):
        return planned(iter([PlanStep(sends=moves(partner, whole))]))
    return planned(iter([PlanStep(adds=moves(partner, whole))]))


def _fold_out(fold: Fold, i: int, spans: Sequence[ElementSpan]) -> Plan:
    """Plan the final step of a pair: the first rank receives its part from the second one."""
    partner = fold.partner(i)
    if partner is None:
        return ()
    if fold.is_folded(i):
        return planned(iter([PlanStep(takes=moves(partner, *spans))]))
    return planned(iter([PlanStep(sends=moves(partner, *spans))]))
