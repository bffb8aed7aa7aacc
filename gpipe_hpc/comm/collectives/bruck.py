"""All-to-all and all-gather in ceil(log2 n) rounds, with partners at distances 1, 2, 4, 8, ...

Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
systems", 1997. A rank needs only O(log n) connections. The cost: pieces are forwarded by other
ranks, so of a vector of B bytes a rank sends B/2 in each round of an all-to-all. An all-gather
sends B in total, which is optimal.

Legend: n ranks (`size`), this one is i (`position`); d is the distance of a round.
"""

from collections.abc import Iterator, Sequence

import torch

from gpipe_hpc.comm.collectives.orders import SummationOrder
from gpipe_hpc.comm.collectives.plan import (
    ElementSpan,
    Plan,
    PlanPosition,
    PlanStep,
    moves,
    planned,
    spans_of,
)
from gpipe_hpc.comm.collectives.run_plan import Combine, Exchange, run_plan


def distances(size: int) -> list[int]:
    """Return the powers of two below the number of ranks."""
    return [1 << k for k in range((size - 1).bit_length())]


def partners(place: PlanPosition) -> list[int]:
    """Return the positions with which a rank needs connections, ascending."""
    n, i = place
    return sorted({(i + sign * d) % n for d in distances(n) for sign in (1, -1)})


def bruck_all_gather(place: PlanPosition, counts: Sequence[int]) -> Plan:
    """Plan an all-gather: in each round, a rank sends its shards to the rank d positions before it.

    ```text n = 5        d = 1      d = 2       d = 4 rank 0       1 <- 1     2 3 <- 2    4 <- 4
    (shards <- source rank) ```
    """

    def steps() -> Iterator[PlanStep]:
        n, i = place
        for d in distances(n):
            num = min(d, n - d)
            yield PlanStep(
                sends=moves((i - d) % n, *_cyclic(counts, i, num)),
                takes=moves((i + d) % n, *_cyclic(counts, (i + d) % n, num)),
            )

    return planned(steps())


def binomial_scatter(place: PlanPosition, counts: Sequence[int]) -> Plan:
    """Plan a scatter of the first rank's vector along a binomial tree: shard i to rank i."""

    def steps() -> Iterator[PlanStep]:
        n, i = place
        spans = spans_of(counts)
        for d in reversed(distances(n)):
            if i % (2 * d) == 0 and i + d < n:
                upper = ElementSpan(spans[i + d].start, spans[min(i + 2 * d, n) - 1].stop)
                yield PlanStep(sends=moves(i + d, upper))
            elif i % (2 * d) == d:
                own = ElementSpan(spans[i].start, spans[min(i + d, n) - 1].stop)
                yield PlanStep(takes=moves(i - d, own))

    return planned(steps())


def all_to_all(
    place: PlanPosition, flat: torch.Tensor, counts: Sequence[int], exchange: Exchange
) -> list[torch.Tensor]:
    """Return this rank's shard of every rank's vector, by position; `flat` is not modified.

    A piece for the rank j positions further moves d positions in each round whose bit d is set in
    j.
    """
    n, i = place
    shards = torch.split(flat, list(counts))
    pieces = [shards[(i + j) % n] for j in range(n)]
    for d in distances(n):
        moved = [j for j in range(n) if j & d]
        # Length of each received piece: it still has to move by the bits of j from d upwards.
        lengths = [counts[(i - d + j - j % d) % n] for j in moved]
        out = torch.cat([pieces[j] for j in moved])
        came = flat.new_empty(sum(lengths))
        exchange(
            [((i + d) % n, out)] if out.numel() else [],
            [((i - d) % n, came)] if came.numel() else [],
        )
        for j, piece in zip(moved, torch.split(came, lengths), strict=True):
            pieces[j] = piece
    return [pieces[(i - origin) % n] for origin in range(n)]


def reduce_scatter(
    place: PlanPosition,
    flat: torch.Tensor,
    order: SummationOrder,
    exchange: Exchange,
    combine: Combine,
) -> None:
    """Replace this rank's shard of `flat` by its sum over all ranks, added in the given order.

    Temporarily uses up to twice the memory of the vector.
    """
    terms = all_to_all(place, flat, order.counts, exchange)
    first, *others = order.chain(place.position)
    total = terms[first].clone()
    for other in others if total.numel() else ():
        combine(total, terms[other])
    torch.split(flat, list(order.counts))[place.position].copy_(total)


def all_reduce(
    place: PlanPosition,
    flat: torch.Tensor,
    order: SummationOrder,
    exchange: Exchange,
    combine: Combine,
) -> None:
    """Replace all elements of `flat` by their sum over all ranks, added in the given order."""
    reduce_scatter(place, flat, order, exchange, combine)
    run_plan(bruck_all_gather(place, order.counts), flat, place.position, exchange)


def _cyclic(counts: Sequence[int], first: int, num: int) -> list[ElementSpan]:
    """Return the spans of `num` consecutive shards from `first` on, wrapping around at the end."""
    spans, end = spans_of(counts), first + num
    found = [ElementSpan(spans[first].start, spans[min(end, len(counts)) - 1].stop)]
    if end > len(counts):
        found.append(ElementSpan(0, spans[end - len(counts) - 1].stop))
    return found
