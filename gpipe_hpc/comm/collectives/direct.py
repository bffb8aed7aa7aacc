"""Every rank with every other: sums in the order of ranks, whatever the cut.

What it costs: n-1 connections of each rank in each half, and room for n-1 shards. What it brings:
each element is ((x0 + x1) + x2) + ..., so the result does not depend on the cut of a model into
buckets, on their order, or on where in a buffer an element lies, for any number of ranks.
"""

from gpipe_hpc.comm.collectives.plan import (
    Place,
    Plan,
    Step,
    even_counts,
    moves,
    planned,
    spans_of,
)


def rank_order_all_reduce(place: Place, count: int) -> Plan:
    """Exchange shards, add each in the order of ranks, gather the sums."""
    n, i = place
    spans = spans_of(even_counts(count, n))
    # At distance d from each rank, so that nobody is everybody's first.
    ahead, behind = [(i + d) % n for d in range(1, n)], [(i - d) % n for d in range(1, n)]
    return planned(
        iter(
            (
                Step(
                    sends=tuple(move for peer in ahead for move in moves(peer, spans[peer])),
                    adds=tuple(move for peer in behind for move in moves(peer, spans[i])),
                ),
                Step(
                    sends=tuple(move for peer in ahead for move in moves(peer, spans[i])),
                    takes=tuple(move for peer in behind for move in moves(peer, spans[peer])),
                ),
            )
        )
    )
