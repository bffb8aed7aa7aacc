"""Between hosts first, then inside each: a slow link is crossed once for each host."""

from collections.abc import Hashable, Sequence

from gpipe_hpc.comm.collectives.plan import Place, Plan, renamed
from gpipe_hpc.comm.collectives.tree import binomial_broadcast


def hierarchical_broadcast(place: Place, root: int, count: int, hosts: Sequence[Hashable]) -> Plan:
    """Broadcast along a binomial tree of one rank a host, then along one inside each host.

    `hosts`: the host of each position. The root is its host's first; elsewhere the lowest position
    is.
    """
    own = hosts[place.position]
    leaders = {hosts[i]: i for i in reversed(range(place.size))} | {hosts[root]: root}
    firsts = sorted(leaders.values())
    inside = [i for i in range(place.size) if hosts[i] == own]
    plan: Plan = ()
    if place.position in firsts:
        plan += _among(firsts, place.position, root, count)
    return plan + _among(inside, place.position, leaders[own], count)


def _among(members: Sequence[int], position: int, root: int, count: int) -> Plan:
    """Return the plan of a broadcast among some of the ranks."""
    place = Place(len(members), members.index(position))
    return renamed(binomial_broadcast(place, members.index(root), count), members.__getitem__)
