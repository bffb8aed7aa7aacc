"""Hierarchical all-reduce: within hosts and between them, to send little over slow links."""

from collections.abc import Hashable, Sequence

from gpipe_hpc.comm.collectives.plan import (
    Plan,
    PlanPosition,
    even_counts,
    renamed,
    shifted,
    spans_of,
)
from gpipe_hpc.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def hierarchical_all_reduce(place: PlanPosition, count: int, hosts: Sequence[Hashable]) -> Plan:
    """Plan a reduce-scatter within each host, an all-reduce between hosts and an all-gather within.

    `hosts` names the host of each position. The vector is divided into as many shards as the
    smallest host has ranks; further ranks of other hosts have none. Of B bytes, 2 (H-1)/H B leave
    each of H hosts. A flat ring sends as much, but only if the ranks of a host are consecutive; a
    mesh, as in Gloo's all-reduce, sends more.
    """
    members: dict[Hashable, list[int]] = {}
    for position, host in enumerate(hosts):
        members.setdefault(host, []).append(position)
    inside = members[hosts[place.position]]
    own = inside.index(place.position)
    shards = even_counts(count, min(map(len, members.values())))
    counts = shards + (0,) * (len(inside) - len(shards))
    within = PlanPosition(len(inside), own)
    plan = renamed(ring_reduce_scatter(within, counts), inside.__getitem__)
    if own < len(shards):
        between = [ranks[own] for ranks in members.values()]
        across = PlanPosition(len(between), between.index(place.position))
        span = spans_of(counts)[own]
        summed = renamed(ring_all_reduce(across, span.length), between.__getitem__)
        plan += shifted(summed, span.start)
    return plan + renamed(ring_all_gather(within, counts), inside.__getitem__)
