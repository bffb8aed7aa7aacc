"""In which order the terms of each element of a sum are added, and who adds them.

The vector is cut into one shard for each rank; the rank that owns a shard adds its terms. Sums of
one order have the same bits, whatever way the terms take to their owner.

Legend: n ranks (`size`); positions count within the group, from 0.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.comm.collectives.plan import even_counts

Chain = Callable[[int], Iterable[int]]
"""Returns the positions whose terms of an owner's shard are added, the first one first."""


class Order(NamedTuple):
    """How many elements each rank owns, and the order of the terms of those."""

    counts: tuple[int, ...]
    chain: Chain


Ordering = Callable[[int, int, int], Order]
"""Takes a number of elements, the bytes of each, and the number of ranks."""


def in_rank_order(count: int, element_bytes: int, size: int) -> Order:
    """Return ((x0 + x1) + x2) + ... for each element, as ``rank_order`` and threads add."""
    return Order(even_counts(count, size), lambda owner: range(size))


def in_ring_order(counts: Sequence[int]) -> Order:
    """Return the order of `ring_reduce_scatter`: from behind the owner on, the owner last."""
    size = len(counts)
    return Order(tuple(counts), lambda owner: [(owner + d) % size for d in range(1, size + 1)])


_GLOO_SEGMENT_BYTES: Final = 1024 * 1024


def in_gloo_order(count: int, element_bytes: int, size: int) -> Order:
    """Return the order of Gloo's own all-reduce: from ahead of the owner backwards, it last.

    Gloo cuts the vector into segments of whole elements, 2 or more a rank and at most 1 MiB each
    (`gloo/allreduce.cc`, the ring); what is left of the last ranks' may be nothing.
    """
    num_bytes = count * element_bytes
    num_segments = max(_over(num_bytes, _GLOO_SEGMENT_BYTES), 2 * size)
    per_rank = _over(num_segments, size)
    of_segment = _over(_over(num_bytes, per_rank * size), element_bytes)
    of_rank = per_rank * of_segment
    counts = (min(of_rank, max(0, count - i * of_rank)) for i in range(size))
    return Order(tuple(counts), lambda owner: [(owner - d) % size for d in range(1, size + 1)])


def _over(number: int, divisor: int) -> int:
    return -(-number // divisor)
