"""Orders of summation: which rank adds the terms of an element, and in which order.

The vector is divided into one shard for each rank, which adds the terms of its shard. Sums in the
same order are bitwise equal, however the terms reach their owner.

Legend: n ranks (`size`); positions count within the group, from 0.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.comm.collectives.plan import even_counts

Chain = Callable[[int], Iterable[int]]
"""Function from an owner to the positions whose terms it adds to its shard, in order."""


class SummationOrder(NamedTuple):
    """The number of elements that each rank owns and the order in which it adds their terms."""

    counts: tuple[int, ...]
    chain: Chain


Ordering = Callable[[int, int, int], SummationOrder]
"""Takes the number of elements, the bytes of each, and the number of ranks."""


def in_rank_order(count: int, element_bytes: int, size: int) -> SummationOrder:
    """Return the order ((x0 + x1) + x2) + ... for each element, as used by `rank_order`."""
    return SummationOrder(even_counts(count, size), lambda owner: range(size))


def in_ring_order(counts: Sequence[int]) -> SummationOrder:
    """Return the order of `ring_reduce_scatter`: from the owner's successor to the owner."""
    size = len(counts)
    return SummationOrder(
        tuple(counts), lambda owner: [(owner + d) % size for d in range(1, size + 1)]
    )


_GLOO_SEGMENT_BYTES: Final = 1024 * 1024


def in_gloo_order(count: int, element_bytes: int, size: int) -> SummationOrder:
    """Return the order of Gloo's all-reduce: backwards from the owner's predecessor to the owner.

    Gloo divides the vector into segments of whole elements, at least 2 for each rank and at most 1
    MiB each (`gloo/allreduce.cc`, the ring). The last ranks may own nothing.
    """
    num_bytes = count * element_bytes
    num_segments = max(_ceil_div(num_bytes, _GLOO_SEGMENT_BYTES), 2 * size)
    per_rank = _ceil_div(num_segments, size)
    of_segment = _ceil_div(_ceil_div(num_bytes, per_rank * size), element_bytes)
    of_rank = per_rank * of_segment
    counts = (min(of_rank, max(0, count - i * of_rank)) for i in range(size))
    return SummationOrder(
        tuple(counts), lambda owner: [(owner - d) % size for d in range(1, size + 1)]
    )


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
