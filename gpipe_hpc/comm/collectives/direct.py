"""Plans in which every rank exchanges with every other, for sums in rank order.

Each element is ((x0 + x1) + x2) + ..., for any number of ranks. The result therefore does not
depend on the partition of a model into buckets, on their order or on an element's position in a
buffer. The cost is n-1 connections of each rank in each half and memory for n-1 shards.
"""

from collections.abc import Sequence

from gpipe_hpc.comm.collectives.plan import (
    Plan,
    PlanPosition,
    PlanStep,
    even_counts,
    moves,
    planned,
    spans_of,
)


def rank_order_reduce_scatter(place: PlanPosition, counts: Sequence[int]) -> Plan:
    """Plan an exchange of shards in which the owner of each adds the terms in rank order."""
    i = place.position
    spans = spans_of(counts)
    ahead, behind = _others(place)
    step = PlanStep(
        sends=tuple(move for peer in ahead for move in moves(peer, spans[peer])),
        adds=tuple(move for peer in behind for move in moves(peer, spans[i])),
    )
    return planned(iter((step,)))


def rank_order_all_reduce(place: PlanPosition, count: int) -> Plan:
    """Plan a `rank_order_reduce_scatter` and an all-gather of the sums."""
    n, i = place
    counts = even_counts(count, n)
    spans = spans_of(counts)
    ahead, behind = _others(place)
    gather = PlanStep(
        sends=tuple(move for peer in ahead for move in moves(peer, spans[i])),
        takes=tuple(move for peer in behind for move in moves(peer, spans[peer])),
    )
    return rank_order_reduce_scatter(place, counts) + planned(iter((gather,)))


def _others(place: PlanPosition) -> tuple[list[int], list[int]]:
    """Return the other ranks in the orders of sending and of receiving, by distance from this rank.

    So all ranks begin with different peers.
    """
    n, i = place
    return [(i + d) % n for d in range(1, n)], [(i - d) % n for d in range(1, n)]
