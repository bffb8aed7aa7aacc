"""Open all connections of a run as the run does, and measure each pair of ranks in turn."""

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.world.groups import RankContext, warm_up_groups
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.engine import Wiring
from gpipe_hpc.errors import DeviceError
from gpipe_hpc.planner import Layout, broadcast_layout
from gpipe_hpc.preflight.connections import ChannelConnection, GroupConnection
from gpipe_hpc.preflight.timing import SUMS, TimedLink, time_line

Pair = tuple[int, int]


class TimedAllReduce(NamedTuple):
    """Measured duration of an all-reduce over a group of ranks."""

    ranks: tuple[int, ...]
    num_bytes: int
    took_s: float


class RankMeasurements(NamedTuple):
    """Links and all-reduces that one rank measured."""

    ways: tuple[TimedLink, ...]
    sums: tuple[TimedAllReduce, ...]


def measure(world: World, mesh: Mesh, decided: Layout | None, most_bytes: int) -> RankMeasurements:
    """Connect the ranks as in the layout of rank 0, and measure all links; collective.

    The lower rank of each pair measures.
    """
    with collective_errors(world, "connecting the ranks of the layout"):
        context = RankContext.of(world, mesh)
        layout = broadcast_layout(
            decided, world.rank, mesh, context.world_group, context.pipeline, context.dp_group
        )
        schedules = [layout.of(replica).schedule for replica in range(mesh.replicas)]
        wiring = Wiring.connect(world, mesh, schedules)
        groups = _different(wiring)
        warm_up_groups([context.world_group, context.pipeline, *groups], world.device)
    ways = _time_channels(world, mesh, layout, wiring, most_bytes)
    sums: list[TimedAllReduce] = []
    timed: set[tuple[int, ...]] = set()
    for group in groups:
        if group.ranks not in timed:  # mirrored stages may have groups with equal ranks
            ways += _time_group(world, group, most_bytes)
        timed.add(group.ranks)
        sums.append(_time_sum(world, group, most_bytes))
    return RankMeasurements(tuple(ways), tuple(sums))


def _different(wiring: Wiring) -> list[Group]:
    groups = {id(group): group for group in wiring.groups()}.values()
    return [group for group in groups if group.size > 1]


def _time_channels(
    world: World, mesh: Mesh, layout: Layout, wiring: Wiring, most_bytes: int
) -> list[TimedLink]:
    """Measure the links of this rank over which pipelines exchange boundary tensors."""
    placed: dict[Pair, PlacedChannel] = {}
    for channel in wiring.channels.values():
        placed.setdefault((channel.source_rank, channel.destination_rank), channel)
    ways: list[TimedLink] = []
    for pairs in in_rounds(placed):
        for pair in pairs:
            if world.rank not in pair:
                continue
            peer = sum(pair) - world.rank
            line = ChannelConnection(
                wiring.transport, placed[world.rank, peer], placed[peer, world.rank]
            )
            with collective_errors(world, _what(pair, "the channels")):
                ways += time_line(line, world.device, world.rank, peer, most_bytes) or ()
                wiring.transport.finish()
    return ways


def _time_group(world: World, group: Group, most_bytes: int) -> list[TimedLink]:
    """Measure the links between consecutive ranks of a group, as in a ring."""
    ways: list[TimedLink] = []
    for pairs in in_rounds(ring(group.ranks)):
        for pair in pairs:
            if world.rank not in pair:
                continue
            peer = sum(pair) - world.rank
            line = GroupConnection(group, peer, world.device)
            with collective_errors(world, _what(pair, "the group")):
                found = time_line(line, world.device, world.rank, peer, most_bytes) or ()
                ways += [way._replace(carries=SUMS) for way in found]
    return ways


def _time_sum(world: World, group: Group, most_bytes: int) -> TimedAllReduce:
    """Measure an all-reduce over a group; raise DeviceError if its result is wrong."""
    device, ranks = world.device, group.ranks
    what = f"summing over ranks {', '.join(map(str, ranks))}"
    with collective_errors(world, what):
        one = torch.full((max(1, most_bytes // 4),), float(group.position + 1))
        expected = group.size * (group.size + 1) / 2
        for _ in range(2):  # the first call allocates buffers
            tensor = device.to_device(one.clone())
            device.synchronize()
            began_s = time.perf_counter()
            group.all_reduce(tensor)
            device.synchronize()
            took_s = time.perf_counter() - began_s
        wrong = device.to_host(tensor)
        wrong = wrong[wrong != expected]
        if len(wrong):
            raise DeviceError(
                f"{what}: rank {world.rank} expected {expected:g} in each element, got "
                f"{wrong[0].item():g} in {len(wrong)} of {one.numel()}; its device or network "
                f"corrupts data: do not use the host, and have it repaired"
            )
    return TimedAllReduce(ranks, one.nbytes, took_s)


def _what(pair: Pair, of: str) -> str:
    return f"timing {of} of ranks {pair[0]} and {pair[1]}"


def in_rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Divide pairs of ranks into rounds in which each rank occurs at most once.

    Deterministic, so that all ranks get the same rounds. Each pair occurs once, its lower rank
    first. The pairs of a chain take two rounds.
    """
    each = {(min(pair), max(pair)) for pair in pairs}
    rounds: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in sorted(each, key=lambda pair: (pair[0] % 2, pair)):
        place = next((i for i, ranks in enumerate(busy) if ranks.isdisjoint(pair)), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append(pair)
        busy[place].update(pair)
    return rounds


def ring(ranks: Sequence[int]) -> list[Pair]:
    """Return the pairs of neighbours in a ring over some ranks."""
    if len(ranks) < 2:
        return []
    return sorted({(min(p), max(p)) for p in pairwise([*ranks, ranks[0]])})
