"""Recursive doubling: exchanges with partners at distances 1, 2, 4, ...

If n is not a power of two, the first ranks are folded into pairs, as in the package's halving.
"""

from collections.abc import Sequence

from gpipe_hpc.comm.collectives.bruck import binomial_scatter
from gpipe_hpc.comm.collectives.halving import Fold, doubling, exchange_full, reduced_spans
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


def recursive_doubling_all_reduce(place: PlanPosition, count: int) -> Plan:
    """Exchange the whole vector with partners at distances 1, 2, 4, ...: few steps, many bytes."""
    return exchange_full(place, count, [1 << step for step in range(Fold(place.size).num_steps)])


def doubling_all_gather(place: PlanPosition, counts: Sequence[int]) -> Plan:
    """Gather all shards by exchanging the known ones with partners at doubling distances."""
    n, i = place
    fold = Fold(n)
    spans, core = spans_of(counts), doubling(fold, i, reduced_spans(fold, counts))
    partner = fold.partner(i)
    if partner is None:
        return core
    folded = spans[min(i, partner)]
    others = ElementSpan(0, folded.start), ElementSpan(folded.stop, sum(counts))
    if fold.is_folded(i):
        first, last = (
            PlanStep(sends=moves(partner, folded)),
            PlanStep(takes=moves(partner, *others)),
        )
        return planned(iter((first, last)))
    first, last = PlanStep(takes=moves(partner, folded)), PlanStep(sends=moves(partner, *others))
    return planned(iter((first, *core, last)))


def scatter_doubling_broadcast(place: PlanPosition, root: int, count: int) -> Plan:
    """Scatter shards along a binomial tree, then gather them by doubling.

    MPICH and MVAPICH broadcast medium sizes in this way.
    """
    size, i = place.size, (place.position - root) % place.size
    counts = even_counts(count, size)
    plan = binomial_scatter(PlanPosition(size, i), counts) + doubling_all_gather(
        PlanPosition(size, i), counts
    )
    return renamed(plan, lambda peer: (peer + root) % size)
