"""Bytes that a step sends over the links of a cluster."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpipe_hpc.planner.stages import StageCount
from gpipe_hpc.schedule import Cluster, Placement


class LinkLoad(NamedTuple):
    """Bytes that a step sends over one link, and whether the link connects two hosts."""

    nbytes: float
    is_between: bool


Loads = dict[tuple[int, int], float]


def boundary_loads(
    stages: Sequence[StageCount], placement: Placement, shares: Sequence[float]
) -> Loads:
    """Return the bytes that ranks of one replica send in a step, by (source, destination)."""
    found: Loads = defaultdict(float)
    each = shares or [1.0] * placement.num_microbatches
    of_route = [0.0] * len(placement.routes)
    for number, share in zip(placement.route_of, each, strict=True):
        of_route[number] += share
    for route, share in zip(placement.routes, of_route, strict=True):
        for at, stage in enumerate(stages):
            ahead = {d: sum(carried.tensors) for d, carried in stage.sent.items()}
            back = {s: sum(carried.gradients) for s, carried in stage.received.items()}
            if at + 1 < len(stages):
                ahead[at + 1] = sum(stage.output.tensors)
            if at:
                back[at - 1] = sum(stage.input.gradients)
            for other, nbytes in [*ahead.items(), *back.items()]:
                way = route[at], route[other]
                if way[0] != way[1]:
                    found[way] += share * nbytes
    return found


def add_sums(
    found: Loads, cluster: Cluster, ranks: Sequence[int], nbytes: float, *, by_host: bool
) -> None:
    """Add the bytes of a ring all-reduce over some ranks to the bytes of each link.

    `by_host`: use a ring inside each host, and a ring of the first rank of each host.
    """
    rings = [list(ranks)]
    if by_host:
        groups: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            groups[cluster.host_of(rank)].append(rank)
        rings = [*groups.values(), [own[0] for own in groups.values()]]
    for ring in rings:
        if len(ring) > 1:
            for way in pairwise([*ring, ring[0]]):
                found[way] = found.get(way, 0.0) + 2 * nbytes * (len(ring) - 1) / len(ring)


def heaviest(cluster: Cluster, found: Loads) -> LinkLoad:
    """Return the largest load among the links with the lowest bandwidth in use."""
    if not found:
        return LinkLoad(0.0, False)
    ways = {way: cluster.link(*way) for way in found}
    slowest = min(link.bandwidth for link in ways.values())
    between = {way: cluster.host_of(way[0]) != cluster.host_of(way[1]) for way in found}
    slow = [way for way, link in ways.items() if link.bandwidth == slowest]
    way = max(slow, key=lambda each: (between[each], found[each]))
    return LinkLoad(found[way], between[way])
