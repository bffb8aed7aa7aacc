"""Recursive doubling: exchanges with partners at distances 1, 2, 4, ...

With n no power of two, the first ranks are folded into pairs, as in the package's halving.
"""

from collections.abc import Sequence

from gpipe_hpc.comm.collectives.bruck import binomial_scatter
from gpipe_hpc.comm.collectives.halving import Fold, doubling, exchange_whole, looked_after
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


def recursive_doubling_all_reduce(place: Place, count: int) -> Plan:
    """Exchange the whole vector with partners at distances 1, 2, 4, ...: few steps, many bytes."""
    return exchange_whole(place, count, [1 << step for step in range(Fold(place.size).num_steps)])


def doubling_all_gather(place: Place, counts: Sequence[int]) -> Plan:
    """Give every rank all shards: exchange what there is with partners ever farther."""
    n, i = place
    fold = Fold(n)
    spans, core = spans_of(counts), doubling(fold, i, looked_after(fold, counts))
    partner = fold.partner(i)
    if partner is None:
        return core
    folded = spans[min(i, partner)]
    others = Span(0, folded.start), Span(folded.stop, sum(counts))
    if fold.is_folded(i):
        first, last = Step(sends=moves(partner, folded)), Step(takes=moves(partner, *others))
        return planned(iter((first, last)))
    first, last = Step(takes=moves(partner, folded)), Step(sends=moves(partner, *others))
    return planned(iter((first, *core, last)))


def scatter_doubling_broadcast(place: Place, root: int, count: int) -> Plan:
    """Scatter shards along a binomial tree, then gather them by doubling.

    MPICH's and MVAPICH's broadcast of middle sizes.
    """
    size, i = place.size, (place.position - root) % place.size
    counts = even_counts(count, size)
    plan = binomial_scatter(Place(size, i), counts) + doubling_all_gather(Place(size, i), counts)
    return renamed(plan, lambda peer: (peer + root) % size)
