"""Every rank with every other: sums in the order of ranks, whatever the cut.

What it costs: n-1 connections of each rank in each half, and room for n-1 shards. What it brings:
each element is ((x0 + x1) + x2) + ..., so the result does not depend on the cut of a model into
buckets, on their order, or on where in a buffer an element lies, for any number of ranks.
"""

from collections.abc import Sequence

from gpipe_hpc.comm.collectives.plan import (
    Place,
    Plan,
    Step,
    even_counts,
    moves,
    planned,
    spans_of,
)


def rank_order_reduce_scatter(place: Place, counts: Sequence[int]) -> Plan:
    """Exchange shards and add each, at its owner, in the order of ranks."""
    i = place.position
    spans = spans_of(counts)
    ahead, behind = _others(place)
    step = Step(
        sends=tuple(move for peer in ahead for move in moves(peer, spans[peer])),
        adds=tuple(move for peer in behind for move in moves(peer, spans[i])),
    )
    return planned(iter((step,)))


def rank_order_all_reduce(place: Place, count: int) -> Plan:
    """Exchange shards, add each in the order of ranks, gather the sums."""
    n, i = place
    counts = even_counts(count, n)
    spans = spans_of(counts)
    ahead, behind = _others(place)
    gather = Step(
        sends=tuple(move for peer in ahead for move in moves(peer, spans[i])),
        takes=tuple(move for peer in behind for move in moves(peer, spans[peer])),
    )
    return rank_order_reduce_scatter(place, counts) + planned(iter((gather,)))


def _others(place: Place) -> tuple[list[int], list[int]]:
    """Return the others as they are sent to and received from, at growing distance from each rank.

    So nobody is everybody's first.
    """
    n, i = place
    return [(i + d) % n for d in range(1, n)], [(i - d) % n for d in range(1, n)]
