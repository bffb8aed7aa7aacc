"""Strategies of summing a bucket of gradients over replicas."""

from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Final

import torch

from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.comm.collectives.planned import start_hierarchical_all_reduce
from gpipe_hpc.data_parallel.layout import BucketItem
from gpipe_hpc.device.host.machine import shared_identity
from gpipe_hpc.settings import Outer

ReduceStrategy = Callable[[torch.Tensor, Sequence[BucketItem]], CollectiveHandle]
"""Starts summing a flat tensor over replicas in place, and returns a handle to wait for.

The second argument describes the contents of the tensor. All replicas start the same sums in the
same order.
"""

_HOST_ID_BYTES: Final = 8


def choose_strategy(outer: Outer, group: Group, *, is_tied: bool = False) -> ReduceStrategy | None:
    """Return how a bucket is summed with these settings; None if the group has no other rank.

    - ``outer.shard=flat``: a reduce-scatter. Each replica gets its shard of the sum; the rest of
      the buffer is undefined afterwards.
    - ``outer.hierarchy``: within hosts first, then between hosts.
    - ``outer.order=rank``: each element is summed in the order of ranks.
    - otherwise the backend's all-reduce, in an order of its choice with equal bits on all replicas.

    Args:
        outer: The settings.
        group: The ranks with the same parameters; all of them must call this.
        is_tied: Whether the group shares a tied parameter. Its ranks are of several stages, so only
            outer.order applies.

    Raises ConfigError for a hierarchy that does not divide the number of replicas.
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


def _collective(start: Callable[[torch.Tensor], CollectiveHandle]) -> ReduceStrategy:
    """Return a strategy that sums the whole buffer, whatever it contains."""
    return lambda flat, items: start(flat)


def _hosts(group: Group, hierarchy: str | int) -> list[Hashable]:
    """Return the host of each replica; all replicas must call this.

    Args:
        group: The replicas.
        hierarchy: ``host``, or the number of consecutive replicas that count as one host.
    """
    if isinstance(hierarchy, int):
        return [position // hierarchy for position in range(group.size)]
    # A rank that shares its network interface with no other counts as a host of its own.
    own = shared_identity("net") or f"position {group.position}"
    host = blake2b(own.encode(), digest_size=_HOST_ID_BYTES).hexdigest()
    runs = group.merge_object([(host, 1)], join_runs)
    return [host for host, count in runs for _ in range(count)]


_Runs = list[tuple[str, int]]
"""Hosts, each with the number of consecutive replicas on it: short for any number of replicas."""


def join_runs(first: _Runs, second: _Runs) -> _Runs:
    """Join the host runs of some replicas with those of the following replicas."""
    (host, count), (next_host, next_count) = first[-1], second[0]
    if host != next_host:
        return [*first, *second]
    return [*first[:-1], (host, count + next_count), *second[1:]]
