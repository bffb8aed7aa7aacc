"""Connect the ranks of a mesh as a schedule's placement needs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.schedule import Channel, Placement, Schedule, digest


@dataclass(frozen=True)
class Wiring:
    """Connections of a rank: its channels, and the group of each of its stages' copies.

    `copies`: all of them. `reductions`: those over which gradients are summed: where replicas train
    apart, of this replica alone. `peers`: the ranks that normalise each micro-batch with this one,
    None for itself alone.
    """

    transport: Transport
    channels: Mapping[Channel, PlacedChannel]
    reductions: Mapping[int, Group]
    copies: Mapping[int, Group]
    peers: Group | None = None

    @classmethod
    def connect(
        cls,
        world: World,
        mesh: Mesh,
        schedules: Sequence[Schedule],
        *,
        normalises_together: bool = False,
        uses_local_sgd: bool = False,
    ) -> "Wiring":
        """Open this rank's channels and form its groups; the same call on every rank.

        Args:
            world: All ranks.
            mesh: Their places in replicas and pipelines.
            schedules: The table of each replica.
            normalises_together: BatchNorm normalises each micro-batch over all replicas.
            uses_local_sgd: Replicas train separately between outer steps.
        """
        replica = mesh.replica_of(world.rank)
        placed = _placed_channels(mesh, schedules[replica], replica)
        transport = world.transport(list(placed.values()))
        different = {id(schedule): schedule for schedule in schedules}
        has_one_table = len({digest(schedule) for schedule in different.values()}) == 1
        placement = schedules[0].placement
        copies = _copies(world, mesh, placement, shares_groups=has_one_table)
        reductions = _within(world, mesh, placement) if uses_local_sgd else copies
        peers = None
        if normalises_together and mesh.replicas > 1:
            # A separate group: the sums of a backward must not wait for gradients under way. All
            # replicas run one table, so a rank's peers are the ranks at its position.
            peers = world.group([mesh.replica_ranks(mesh.stage_rank_of(world.rank))])
        return cls(transport, placed, reductions, copies, peers)

    def groups(self) -> list[Group]:
        """Return all groups, in an order that is the same on all ranks that share some."""
        each = [self.copies[i] for i in sorted(self.copies)]
        each += [self.reductions[i] for i in sorted(self.reductions)]
        return each if self.peers is None else [*each, self.peers]


def _copies(
    world: World, mesh: Mesh, placement: Placement, *, shares_groups: bool
) -> dict[int, Group]:
    """Form, for each stage of this rank, the group of all ranks with a copy of it.

    Stages of one rank share its group over the replicas. A mirrored stage has a group of its own:
    its holders may come to their reductions in different orders. So has each stage of a rank with
    several where replicas run different tables (`shares_groups`: they do not).
    """
    own = mesh.stage_rank_of(world.rank)
    shares_groups |= all(len(placement.stages_of(k)) < 2 for k in range(placement.num_ranks))
    over_replicas = world.group([mesh.replica_ranks(own)])
    groups: dict[int, Group] = {}
    for stage in range(placement.num_stages):
        holders = placement.holders(stage)
        if own not in holders:
            continue
        groups[stage] = over_replicas
        if len(holders) > 1 or not shares_groups:
            ranks = [mesh.world_rank(r, k) for r in range(mesh.replicas) for k in holders]
            groups[stage] = world.group([ranks])
    return groups


def _within(world: World, mesh: Mesh, placement: Placement) -> dict[int, Group]:
    """Form, for each stage of this rank, the group of its replica's ranks that have the stage."""
    own, replica = mesh.stage_rank_of(world.rank), mesh.replica_of(world.rank)
    groups: dict[int, Group] = {}
    for stage in range(placement.num_stages):
        holders = placement.holders(stage)
        if own in holders:
            groups[stage] = world.group([[mesh.world_rank(replica, k) for k in holders]])
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
