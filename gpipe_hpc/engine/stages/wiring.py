"""Connect the ranks of a mesh as a schedule's placement needs it."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.mesh import Mesh
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.world import World
from gpipe_hpc.schedule import Channel, Placement, Schedule


@dataclass(frozen=True)
class Wiring:
    """How a rank is connected: its channels, and the group of the copies of each of its stages.

    `peers`: the ranks that normalise each micro-batch with this one, None for itself alone.
    """

    transport: Transport
    channels: Mapping[Channel, PlacedChannel]
    reductions: Mapping[int, Group]
    peers: Group | None = None


def wire(
    world: World, mesh: Mesh, schedule: Schedule, *, normalises_together: bool = False
) -> Wiring:
    """Open all channels and reduction groups; the same call on every rank.

    `normalises_together`: BatchNorm layers normalise a micro-batch over all replicas.
    """
    replica = mesh.replica_of(world.rank)
    placed = {r: _placed_channels(mesh, schedule, r) for r in range(mesh.replicas)}
    transport = world.transport([c for channels in placed.values() for c in channels.values()])
    reductions = _reductions(world, mesh, schedule.placement)
    peers = None
    if normalises_together and mesh.replicas > 1:
        # Its own: what a backward sums must not wait for gradients under way. All replicas run
        # one table, so a rank's peers are those at its position.
        peers = world.group([mesh.replica_ranks(k) for k in range(mesh.stages)])
    return Wiring(transport, placed[replica], reductions, peers)


def _reductions(world: World, mesh: Mesh, placement: Placement) -> dict[int, Group]:
    """Form, for each stage of this rank, the group of all that hold a copy of it.

    Stages of one rank share its group over the replicas. A mirrored stage has a group of its own:
    its holders may come to their reductions in different orders.
    """
    own = mesh.stage_rank_of(world.rank)
    over_replicas = world.group([mesh.replica_ranks(k) for k in range(mesh.stages)])
    groups: dict[int, Group] = {}
    for stage in range(placement.num_stages):
        holders = placement.holders(stage)
        group = over_replicas
        if len(holders) > 1:
            ranks = [mesh.world_rank(r, k) for r in range(mesh.replicas) for k in holders]
            others = [(rank,) for rank in range(mesh.size) if rank not in ranks]
            group = world.group([ranks, *others])
        if own in holders:
            groups[stage] = group
    return groups


def _placed_channels(mesh: Mesh, schedule: Schedule, replica: int) -> dict[Channel, PlacedChannel]:
    """Return the channels between different ranks of one replica, numbered in one order."""
    neighbours = [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
    channels: dict[Channel, PlacedChannel] = {}
    for route, ranks in enumerate(schedule.placement.routes):
        for pair in (*neighbours, *schedule.skips):
            if ranks[pair[0]] == ranks[pair[1]]:
                continue
            for source, destination in (pair, pair[::-1]):
                channels[Channel(source, destination, route)] = PlacedChannel(
                    Channel(source, destination, route),
                    mesh.world_rank(replica, ranks[source]),
                    mesh.world_rank(replica, ranks[destination]),
                    tag=len(channels),
                )
    return channels
