"""How a bucket of gradients is summed over the copies of a stage."""

from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Final

import torch

from gpipe_hpc.comm.collectives.group import Group, Pending
from gpipe_hpc.comm.collectives.menu import start_hierarchical_all_reduce
from gpipe_hpc.data_parallel.layout import BucketItem
from gpipe_hpc.device.host.machine import shared_identity
from gpipe_hpc.settings import Outer

ReduceStrategy = Callable[[torch.Tensor, Sequence[BucketItem]], Pending]
"""Starts summing a flat tensor over the copies of a stage, in place.

The second argument says what lies in the tensor. The sum is complete after waiting for the result.
All copies start the same sums in one order.
"""

_HOST_ID_BYTES: Final = 8


def choose_strategy(outer: Outer, group: Group, *, is_tied: bool = False) -> ReduceStrategy | None:
    """Return how the settings sum a bucket; None if the group has no other rank.

    - ``outer.shard=flat``: a reduce-scatter. Each copy gets its equal part of the sum, and the rest
      of the buffer means nothing afterwards.
    - ``outer.hierarchy``: within hosts first, then between them.
    - ``outer.order=rank``: each element in the order of ranks, wherever it lies in a bucket.
    - else the backend's all-reduce: the same bits on all copies, in an order of its choice.

    Args:
        outer: The settings.
        group: The ranks that hold the parameters; all of them call it.
        is_tied: Of a tied parameter, whose holders are ranks of several stages, only the order of
            summing applies.

    Raises ConfigError for a hierarchy that does not divide the number of copies.
    """
    if group.size == 1:
        return None
    is_ordered = outer.order == "rank"
    if outer.shard == "flat" and not is_tied:
        return _collective(
            group.start_ordered_reduce_scatter if is_ordered else group.start_reduce_scatter
        )
    if outer.hierarchy != "none" and not is_tied:
        outer.check_copies(group.size)
        hosts = _hosts(group, outer.hierarchy)
        return _collective(lambda flat: start_hierarchical_all_reduce(group, flat, hosts))
    return _collective(group.start_ordered_all_reduce if is_ordered else group.start_all_reduce)


def _collective(start: Callable[[torch.Tensor], Pending]) -> ReduceStrategy:
    """Return a strategy that sums the whole buffer, whatever lies in it."""
    return lambda flat, items: start(flat)


def _hosts(group: Group, hierarchy: str | int) -> list[Hashable]:
    """Return the host of each copy; the same call on all copies.

    `hierarchy`: ``host``, or how many consecutive copies count as one host.
    """
    if isinstance(hierarchy, int):
        return [position // hierarchy for position in range(group.size)]
    # A rank that shares its network interface with no other counts as a host of its own.
    own = shared_identity("net") or f"position {group.position}"
    host = blake2b(own.encode(), digest_size=_HOST_ID_BYTES).hexdigest()
    runs = group.merge_object([(host, 1)], join_runs)
    return [host for host, count in runs for _ in range(count)]


_Runs = list[tuple[str, int]]
"""Hosts, each with the number of consecutive copies there: short, however many copies."""


def join_runs(first: _Runs, second: _Runs) -> _Runs:
    """Join the runs of hosts of some copies with those of the copies that follow."""
    (host, count), (next_host, next_count) = first[-1], second[0]
    if host != next_host:
        return [*first, *second]
    return [*first[:-1], (host, count + next_count), *second[1:]]
