"""Connections of stages: tables, routes between stages, channels and process groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.data_parallel import Buckets
from gpipe_hpc.engine.inputs import State
from gpipe_hpc.models import Skip, skip_routes
from gpipe_hpc.pytree import Nest
from gpipe_hpc.schedule import Channel, Placement, Schedule, digest

BATCH: Final = -1
"""The source of stage 0: the batch itself."""


class Tables(NamedTuple):
    """The lowered and checked tables of a pipeline, and the gradient buckets of each stage.

    Args:
        training: The table of a training step.
        evaluation: The table of an evaluation or a prediction.
        buckets: For each stage the buckets into which its gradients are gathered; empty if no
            stage has another copy.
        averaging: With local SGD, the table of a step that ends with an average of the parameters;
            else None.
    """

    training: Schedule
    evaluation: Schedule
    buckets: tuple[Buckets, ...] = ()
    averaging: Schedule | None = None

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Return the tables that are not None."""
        tables = self.training, self.evaluation, self.averaging
        return tuple(table for table in tables if table is not None)

    def with_schedules(self, schedules: Sequence[Schedule]) -> "Tables":
        """Return a copy with other schedules, in the order of `schedules`."""
        training, evaluation, *averaging = schedules
        return self._replace(
            training=training,
            evaluation=evaluation,
            averaging=averaging[0] if averaging else None,
        )


class StageRoutes(NamedTuple):
    """The stages that one stage receives values from and sends values to.

    Each stage is mapped to the names of the skip values on the way. The first one of each mapping
    is the neighbour, to which the boundary belongs too; the last stage has no destinations.
    """

    sources: Mapping[int, tuple[str, ...]]
    destinations: Mapping[int, tuple[str, ...]]

    def gather(self, parts: Sequence[Nest]) -> State:
        """Combine the received parts, one for each source, into an input."""
        (names, nest), *others = zip(self.sources.values(), parts, strict=True)
        stashed: dict[str, Nest] = {}
        if names:
            nest, *values = nest
            stashed.update(zip(names, values, strict=True))
        for names, part in others:
            stashed.update(zip(names, part, strict=True))
        return State(nest, stashed)

    def scatter(self, state: State) -> list[Nest]:
        """Split an output into one part for each destination."""
        nest, stashed = state
        parts = [tuple(stashed[name] for name in names) for names in self.destinations.values()]
        if parts:
            parts[0] = (nest, *parts[0]) if parts[0] else nest
        return parts


def stage_routes(skips: Sequence[Skip], counts: Sequence[int]) -> list[StageRoutes]:
    """Return the routes of each stage, if stages have `counts` layers.

    A skip to the next stage travels together with the boundary.
    """
    routes = skip_routes(skips, counts).items()
    crossing = [(ends, tuple(skip.name for skip in own)) for ends, own in routes]
    found = []
    for stage in range(len(counts)):
        sources = {source: names for (source, end), names in crossing if end == stage}
        destinations = {end: names for (source, end), names in crossing if source == stage}
        if stage < len(counts) - 1:
            destinations = {stage + 1: (), **destinations}
        found.append(StageRoutes({stage - 1: (), **sources}, destinations))
    return found


@dataclass(frozen=True)
class Wiring:
    """Connections of a rank: its channels, and for each of its stages a group of ranks.

    Args:
        transport: Sends and receives messages.
        channels: The channels to and from other ranks.
        reductions: For each stage the ranks over which its gradients are summed: those of
            `copies`, or with local SGD those of this replica.
        copies: For each stage all ranks that hold a copy.
        peers: The ranks over which BatchNorm normalises each micro-batch; None for this rank alone.
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
            # A separate group, so that sums in a backward do not wait for reductions of gradients.
            # All replicas run one table, so a rank's peers are the ranks at its position.
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
    """Create, for each stage of this rank, the group of all ranks with a copy of it.

    Stages of one rank share its group over the replicas. A mirrored stage has a group of its own,
    as its holders may start their reductions in different orders. So does each stage of a rank with
    several stages, if replicas run different tables (`shares_groups` is False).
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
    """Create, for each stage of this rank, the group of its replica's ranks that hold it."""
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
