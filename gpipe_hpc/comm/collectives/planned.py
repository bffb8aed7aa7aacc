"""Start planned collectives over a group: along rings, in rank order, or hierarchically by host."""

from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch

from gpipe_hpc.comm.collectives.direct import (
    rank_order_all_reduce,
    rank_order_reduce_scatter,
)
from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group
from gpipe_hpc.comm.collectives.hierarchy import hierarchical_all_reduce
from gpipe_hpc.comm.collectives.plan import Plan, PlanPosition
from gpipe_hpc.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from gpipe_hpc.comm.collectives.shards import checked_counts
from gpipe_hpc.errors import ConfigError


def start_ring_all_reduce(group: Group, tensor: torch.Tensor) -> CollectiveHandle:
    """Start summing `tensor` in place along a ring.

    The order of summation depends on the position of an element in the tensor.
    """
    plan = _all_reduce_plan(_place(group), tensor.numel())
    return group.start_plan(plan, tensor, "all-reduce by ring")


def start_ordered_all_reduce(group: Group, tensor: torch.Tensor) -> CollectiveHandle:
    """Start summing `tensor` in place in rank order; any two ranks must be connected."""
    plan = _ordered_plan(_place(group), tensor.numel())
    return group.start_plan(plan, tensor, "all-reduce in the order of ranks")


def start_hierarchical_all_reduce(
    group: Group, tensor: torch.Tensor, hosts: Sequence[Hashable]
) -> CollectiveHandle:
    """Start summing `tensor` in place, first within hosts and then between them.

    `hosts` names the host of each rank. Raises ConfigError if its length is not the group size.
    """
    if len(hosts) != group.size:
        raise ConfigError(
            f"all-reduce: expected one host for each of {group.size} ranks, got {len(hosts)} hosts"
        )
    plan = hierarchical_all_reduce(_place(group), tensor.numel(), hosts)
    return group.start_plan(plan, tensor, f"all-reduce by hosts {_numbered(hosts)}")


def start_ordered_reduce_scatter(group: Group, whole: torch.Tensor) -> CollectiveHandle:
    """Start a reduce-scatter of equal shards in rank order; any two ranks must be connected."""
    plan = rank_order_reduce_scatter(_place(group), checked_counts(whole, None, group.size))
    return group.start_plan(plan, whole, "reduce-scatter in the order of ranks")


def start_reduce_scatter(
    group: Group, whole: torch.Tensor, counts: Sequence[int] | None = None
) -> CollectiveHandle:
    """Start a reduce-scatter of shards of `counts` elements along a ring."""
    sizes = checked_counts(whole, counts, group.size)
    plan = _reduce_scatter_plan(_place(group), sizes)
    return group.start_plan(plan, whole, f"reduce-scatter by ring, shards {sizes}")


def start_all_gather(
    group: Group, whole: torch.Tensor, counts: Sequence[int] | None = None
) -> CollectiveHandle:
    """Start an all-gather of shards of `counts` elements along a ring."""
    sizes = checked_counts(whole, counts, group.size)
    plan = _all_gather_plan(_place(group), sizes)
    return group.start_plan(plan, whole, f"all-gather by ring, shards {sizes}")


def _place(group: Group) -> PlanPosition:
    return PlanPosition(group.size, group.position)


def _numbered(hosts: Sequence[Hashable]) -> list[int]:
    """Return hosts as integers that are equal on all ranks if the hosts are."""
    firsts: dict[Hashable, int] = {}
    return [firsts.setdefault(host, at) for at, host in enumerate(hosts)]


@lru_cache(maxsize=64)
def _all_reduce_plan(place: PlanPosition, count: int) -> Plan:
    return ring_all_reduce(place, count)


@lru_cache(maxsize=64)
def _ordered_plan(place: PlanPosition, count: int) -> Plan:
    return rank_order_all_reduce(place, count)


@lru_cache(maxsize=64)
def _reduce_scatter_plan(place: PlanPosition, counts: tuple[int, ...]) -> Plan:
    return ring_reduce_scatter(place, counts)


@lru_cache(maxsize=64)
def _all_gather_plan(place: PlanPosition, counts: tuple[int, ...]) -> Plan:
    return ring_all_gather(place, counts)
