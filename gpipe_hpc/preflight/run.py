"""From the settings to a report: the ranks meet, say what they are, connect, and time the links."""

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.comm.watchdog.patience import patiently
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, together
from gpipe_hpc.device.cores.bind import bound
from gpipe_hpc.device.host.machine import kernel_identity
from gpipe_hpc.planner.cluster_file import write_cluster
from gpipe_hpc.planner.costs.prices import Prices, write_prices
from gpipe_hpc.planner.costs.speed import paces_of_times, seconds_of_work
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.links import WITHIN, Links
from gpipe_hpc.preflight.before import skew_text
from gpipe_hpc.preflight.clocks import Attendance, attend, farthest
from gpipe_hpc.preflight.facts import Facts, try_device
from gpipe_hpc.preflight.folder import check_folder
from gpipe_hpc.preflight.layout import Planned, plan_layout
from gpipe_hpc.preflight.measuring import Measured, Sum, measure
from gpipe_hpc.preflight.report import Report, host_number, slow_texts
from gpipe_hpc.preflight.room import Room, own_rooms, probe_copies
from gpipe_hpc.preflight.settings import check_settings
from gpipe_hpc.schedule import Link
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.measuring.pricing import measure_prices
from gpipe_hpc.trainer.run.folder import default_run_folder
from gpipe_hpc.units import bytes_text, ranges_text

_SLOW_PACE: Final = 1.5  # from which a rank is named; less is told to the planner alone


class _Told(NamedTuple):
    """What a rank tells rank 0."""

    facts: Facts
    measured: Measured
    work_s: float


def preflight(config: Config, world: World) -> Report | None:
    """Look whether the ranks are fit for a run; return the report on rank 0.

    Every rank calls it. Raises GpipeError, on all ranks, where some cannot work together at all:
    ConfigError for unequal settings or a run folder that is not shared, PeerError or LaunchError
    for ranks that do not reach one another, DeviceError for one that computes wrong.
    """
    began_s, train = time.monotonic(), config.train
    with together(world, "comparing the settings"):
        check_settings(world, config)
        try_device(world.device, world.rank)
    with bound(world, train.bind, train.num_threads) as cores:  # as the run will compute
        report = _look(config, world)
    if report is not None:
        report.cores = cores
        report.took_s = time.monotonic() - began_s
    return report


def _look(config: Config, world: World) -> Report | None:
    """Look at folder, layout, links and memory; return the report on rank 0."""
    folder = check_folder(world, _run_folder(config) if world.rank == 0 else None)
    plan = partial(plan_layout, config, world.size) if world.rank == 0 else None
    planned = patiently(world, "planning the layout", plan)
    with together(world, "telling the layout"):
        told = None if planned is None else _plain(planned)
        (replicas, stages), forecasts = world.everybody.broadcast_object(told, root=0)
        mesh = Mesh(replicas, stages)
        own = None if forecasts is None else forecasts[mesh.stage_rank_of(world.rank)]
        forecast = None if own is None else RankForecast(**own)
        kept = probe_copies(config, world)
        rooms = own_rooms(config, world.device, world.rank, forecast, is_built=False, kept=kept)
    assert isinstance(config.preflight.bytes, int | float), "the settings were read"
    layout = None if planned is None else planned.layout
    measured = measure(world, mesh, layout, int(config.preflight.bytes))
    prices = _prices(config, world, mesh, measured, folder) if config.preflight.steps else None
    with together(world, "gathering what was found"):
        work_s = seconds_of_work(world.device, config.train.precision)
        attended = attend(world.everybody, world.rank, socket.gethostname())
        facts = Facts.of(world.rank, world.device, forecast, rooms, attended)
        gathered = world.everybody.gather_object(_Told(facts, measured, work_s), root=0)
        report = None
        if gathered is not None and planned is not None:
            report = _report(config, planned, gathered, folder)
            if prices is not None:
                report.prices = prices
                write_prices(Path(config.preflight.prices).absolute(), prices)
    return report


def _prices(
    config: Config, world: World, mesh: Mesh, measured: Measured, folder: Path
) -> Prices | None:
    """Return, on rank 0, what a step takes beside its layers, and what a send takes.

    `folder`: of the run to come; one within it is taken, which goes again, and both if it was new.
    """
    with together(world, "gathering links"):
        told = world.everybody.gather_object((kernel_identity(), measured.ways), root=0)
        word: str = world.everybody.broadcast_object(secrets.token_hex(4), root=0)
    send = Link()
    if told is not None:
        links = Links([host for host, _ in told], [way for _, ways in told for way in ways])
        kinds = [kind for key, kind in links.kinds().items() if key[0] == WITHIN]
        send = kinds[0].link if kinds else send
    is_new = world.rank == 0 and not folder.exists()
    try:
        return measure_prices(config, world, mesh, send, folder / f"prices_{word}")
    finally:
        if is_new:
            with suppress(OSError):  # others have put something there, or it was not made
                folder.rmdir()


def _plain(planned: Planned) -> tuple[tuple[int, int], list[dict[str, Any]] | None]:
    """Return what all ranks need of it, as it travels."""
    rows = None if planned.ranks is None else [dict(vars(rank)) for rank in planned.ranks]
    return (planned.mesh.replicas, planned.mesh.stages), rows


def _run_folder(config: Config) -> Path:
    return Path(config.run.dir or default_run_folder())


def _report(config: Config, planned: Planned, told: Sequence[_Told], folder: Path) -> Report:
    facts = [each.facts for each in told]
    ways = [way for each in told for way in each.measured.ways]
    links = Links([each.machine for each in facts], ways)
    report = Report(_heading(planned, facts), facts, links, _sums(told), str(folder))
    report.lacking += _lacking(facts)
    report.doubts += _doubts(planned, facts)
    if config.pipeline.is_searched:
        report.doubts.append(
            f"pipeline.layout=auto: expected to know the layout, got one that train will search; "
            f"what was looked at is {_ranks_text(planned.mesh)}: search first (python -m "
            f"gpipe_hpc.plan plan.search=true plan.links={config.preflight.out}), and look again"
        )
    report.doubts += slow_texts(links, facts)
    paces = _paces([each.work_s for each in told])
    report.doubts += [
        f"slow rank: rank {rank} on {facts[rank].host}, expected about the work of the others, got "
        f"{pace:.2f} times their time for the same; look what else runs there, and how it is "
        f"cooled, or let the cut heed it by pipeline.paces=measured"
        for rank, pace in paces.items()
        if pace >= _SLOW_PACE
    ]
    report.written = _write(config, links, facts, paces)
    return report


def _heading(planned: Planned, facts: Sequence[Facts]) -> str:
    schedule, mesh = planned.layout.schedule, planned.mesh
    hosts = len(host_number(facts))
    return (
        f"preflight of {len(facts)} rank{'s' * (len(facts) > 1)} on {hosts} "
        f"host{'s' * (hosts > 1)}: {_ranks_text(mesh)}, "
        f"{schedule.num_stages} stages, schedule {schedule.name}"
    )


def _ranks_text(mesh: Mesh) -> str:
    return f"{mesh.replicas} x {mesh.stages} ranks"


def _sums(told: Sequence[_Told]) -> list[Sum]:
    """Return each group once, with the longest that a rank of it took."""
    found: dict[tuple[int, ...], Sum] = {}
    for each in (each for one in told for each in one.measured.sums):
        known = found.get(each.ranks)
        found[each.ranks] = each if known is None or known.took_s < each.took_s else known
    return [found[ranks] for ranks in sorted(found)]


def _lacking(facts: Sequence[Facts]) -> list[str]:
    rooms: dict[tuple[str, str], Room] = {}
    for room in (room for each in facts for room in each.rooms):
        key = room.what, room.place
        rooms[key] = room if key not in rooms else _joined(rooms[key], room)
    files = max(each.files for each in facts)
    lacking = [str(room) for room in rooms.values() if room.lack_bytes > 0]
    return [*lacking, *([str(files)] if files.lack > 0 else [])]


def _joined(one: Room, other: Room) -> Room:
    """Return the room of ranks that share memory, whatever numbers they have."""
    frees = [free for free in (one.free_bytes, other.free_bytes) if free is not None]
    return one._replace(
        ranks=(min(one.ranks[0], other.ranks[0]), max(one.ranks[1], other.ranks[1])),
        needed_bytes=one.needed_bytes + other.needed_bytes,
        free_bytes=min(frees, default=None),
    )


def _doubts(planned: Planned, facts: Sequence[Facts]) -> list[str]:
    doubts = []
    if planned.ranks is None:
        doubts.append(
            f"memory was not planned, so not compared with what is free: {planned.why_not}"
        )
    attended = (Attendance(each.came, each.left) for each in facts)
    skew = skew_text(reduce(farthest, attended))
    doubts += [] if skew is None else [skew]
    for what, of in (("Python", "python"), ("device", "device")):
        first = getattr(facts[0], of)
        others = [each for each in facts if getattr(each, of) != first]
        if others:
            ranks = ranges_text(each.rank for each in others)
            doubts.append(
                f"{what}: expected that of rank 0 on all ranks, {first}, got "
                f"{getattr(others[0], of)} on ranks {ranks} ({others[0].host}); use one kind where "
                f"you can"
            )
    machines: dict[str, set[str]] = {}
    for each in facts:
        machines.setdefault(each.host, set()).add(each.machine)
    doubts += [
        f"host name: expected one for each host, got {name} for {len(each)}; messages cannot tell "
        f"them apart: give each its own"
        for name, each in machines.items()
        if len(each) > 1
    ]
    return doubts


def _paces(work_s: Sequence[float]) -> dict[int, float]:
    """Return how many times as long slow ranks take."""
    if len(work_s) < 2:
        return {}
    return {rank: pace for rank, pace in enumerate(paces_of_times(work_s)) if pace != 1}


def _write(config: Config, links: Links, facts: Sequence[Facts], paces: dict[int, float]) -> str:
    """Write what the planner takes; return what to say of it."""
    cluster, out = links.cluster(paces), config.preflight.out
    if out is None:
        return ""
    if cluster is None:
        return f"{out} is not written, as no two ranks send each other anything"
    names = [facts[block[0]].host for block in links.blocks()]
    day, most = time.strftime("%Y-%m-%d %H:%M:%S"), bytes_text(config.preflight.bytes)
    about = (
        f"Measured by python -m gpipe_hpc.preflight, {day}, with up to {most} a message.\n"
        f"Each way while other pairs of ranks use theirs; medians, and ways far from them."
    )
    path = Path(out).absolute()
    write_cluster(path, cluster, names, about)
    return f"what links the ranks, for the planner: {path}"
