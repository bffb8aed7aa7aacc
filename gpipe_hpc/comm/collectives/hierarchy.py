"""Inside hosts and between them apart: what crosses a slow link does so once for each host."""

from collections.abc import Hashable, Sequence

from gpipe_hpc.comm.collectives.plan import (
    Place,
    Plan,
    even_counts,
    renamed,
    shifted,
    spans_of,
)
from gpipe_hpc.comm.collectives.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def hierarchical_all_reduce(place: Place, count: int, hosts: Sequence[Hashable]) -> Plan:
    """Reduce and scatter inside each host, sum the shards between hosts, gather them inside.

    `hosts`: the host of each position. There are as many shards as the host with the fewest ranks
    has; where a host has more, the further ones hold none. Of B bytes on H hosts, 2 (H-1)/H B leave
    each host in all; a flat ring would send as much, but with all ranks of a host behind one
    another. A mesh, as of Gloo's own, sends more.
    """
    members: dict[Hashable, list[int]] = {}
    for position, host in enumerate(hosts):
        members.setdefault(host, []).append(position)
    inside = members[hosts[place.position]]
    own = inside.index(place.position)
    shards = even_counts(count, min(map(len, members.values())))
    counts = shards + (0,) * (len(inside) - len(shards))
    within = Place(len(inside), own)
    plan = renamed(ring_reduce_scatter(within, counts), inside.__getitem__)
    if own < len(shards):
        between = [ranks[own] for ranks in members.values()]
        across = Place(len(between), between.index(place.position))
        span = spans_of(counts)[own]
        summed = renamed(ring_all_reduce(across, span.length), between.__getitem__)
        plan += shifted(summed, span.start)
    return plan + renamed(ring_all_gather(within, counts), inside.__getitem__)
