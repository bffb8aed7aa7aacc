"""Run a preflight: connect all ranks, collect facts, time links, and report."""

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.comm.watchdog.heartbeat import run_with_heartbeat
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.device.cores.bind import bound
from gpipe_hpc.device.host.machine import kernel_identity
from gpipe_hpc.planner.cluster_file import write_cluster
from gpipe_hpc.planner.costs.prices import Prices, write_prices
from gpipe_hpc.planner.costs.speed import paces_of_times, seconds_of_work
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.links import WITHIN, TimedLinks
from gpipe_hpc.preflight.clocks import ClockBounds, merge_clock_bounds, timed_barrier
from gpipe_hpc.preflight.facts import Facts, try_device
from gpipe_hpc.preflight.folder import check_folder
from gpipe_hpc.preflight.layout import PlannedLayout, plan_layout
from gpipe_hpc.preflight.measuring import RankMeasurements, TimedAllReduce, measure
from gpipe_hpc.preflight.memory_needs import MemoryNeed, own_memory_needs, probe_copies
from gpipe_hpc.preflight.rank_checks import skew_text
from gpipe_hpc.preflight.report import PreflightReport, host_number, slow_texts
from gpipe_hpc.preflight.settings import check_settings
from gpipe_hpc.schedule import Link
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.measuring.overheads import measure_prices
from gpipe_hpc.trainer.run.folder import default_run_folder
from gpipe_hpc.units import bytes_text, ranges_text

MESSAGE_BYTES: Final = 4_000_000
"""Size of the largest measured message; slow links get smaller ones."""

_SLOW_PACE: Final = 1.5  # minimum slowdown that is reported; smaller ones only affect the planner


class _RankResult(NamedTuple):
    """Findings of one rank, sent to rank 0."""

    facts: Facts
    measured: RankMeasurements
    work_s: float


def preflight(config: Config, world: World) -> PreflightReport | None:
    """Check whether the ranks are ready for a run; return the report on rank 0. Collective.

    Raises GpipeError on all ranks if some cannot work together: ConfigError for unequal settings or
    a run folder that is not shared, PeerError or LaunchError for ranks that cannot connect,
    DeviceError for wrong results of a device.
    """
    began_s, train = time.monotonic(), config.train
    with collective_errors(world, "comparing the settings"):
        check_settings(world, config)
        try_device(world.device, world.rank)
    with bound(world, train.bind, train.num_threads) as cores:  # as the run will compute
        report = _run_checks(config, world)
    if report is not None:
        report.cores = cores
        report.took_s = time.monotonic() - began_s
    return report


def _run_checks(config: Config, world: World) -> PreflightReport | None:
    """Check folder, layout, links and memory; return the report on rank 0."""
    folder = check_folder(world, _run_folder(config) if world.rank == 0 else None)
    plan = partial(plan_layout, config, world.size) if world.rank == 0 else None
    planned = run_with_heartbeat(world, "planning the layout", plan)
    with collective_errors(world, "broadcasting the layout"):
        received = None if planned is None else _plain(planned)
        (replicas, stages), forecasts = world.world_group.broadcast_object(received, root=0)
        mesh = Mesh(replicas, stages)
        own = None if forecasts is None else forecasts[mesh.stage_rank_of(world.rank)]
        forecast = None if own is None else RankForecast(**own)
        kept = probe_copies(config, world)
        needs = own_memory_needs(
            config, world.device, world.rank, forecast, is_built=False, kept=kept
        )
    layout = None if planned is None else planned.layout
    measured = measure(world, mesh, layout, MESSAGE_BYTES)
    prices = _prices(config, world, mesh, measured, folder) if config.preflight.steps else None
    with collective_errors(world, "gathering the findings"):
        work_s = seconds_of_work(world.device, config.train.precision)
        attended = timed_barrier(world.world_group, world.rank, socket.gethostname())
        facts = Facts.of(world.rank, world.device, forecast, needs, attended)
        gathered = world.world_group.gather_object(_RankResult(facts, measured, work_s), root=0)
        report = None
        if gathered is not None and planned is not None:
            report = _report(config, planned, gathered, folder)
            if prices is not None:
                report.prices = prices
                path = Path(config.preflight.out or "links.yaml").absolute()
                write_prices(path.with_name("prices.yaml"), prices)
    return report


def _prices(
    config: Config, world: World, mesh: Mesh, measured: RankMeasurements, folder: Path
) -> Prices | None:
    """Measure the overheads of a step; return them on rank 0, None on other ranks.

    Uses a temporary folder within the run folder `folder` and removes it, and `folder` too if it
    was new.
    """
    with collective_errors(world, "gathering links"):
        received = world.world_group.gather_object((kernel_identity(), measured.ways), root=0)
        token: str = world.world_group.broadcast_object(secrets.token_hex(4), root=0)
    send = Link()
    if received is not None:
        links = TimedLinks(
            [host for host, _ in received], [way for _, ways in received for way in ways]
        )
        kinds = [kind for key, kind in links.kinds().items() if key[0] == WITHIN]
        send = kinds[0].link if kinds else send
    is_new = world.rank == 0 and not folder.exists()
    try:
        return measure_prices(config, world, mesh, send, folder / f"prices_{token}")
    finally:
        if is_new:
            with suppress(OSError):  # not empty, or never created
                folder.rmdir()


def _plain(planned: PlannedLayout) -> tuple[tuple[int, int], list[dict[str, Any]] | None]:
    """Return the mesh and the memory forecasts as plain data, to broadcast to all ranks."""
    rows = None if planned.ranks is None else [dict(vars(rank)) for rank in planned.ranks]
    return (planned.mesh.replicas, planned.mesh.stages), rows


def _run_folder(config: Config) -> Path:
    return Path(config.run.dir or default_run_folder())


def _report(
    config: Config, planned: PlannedLayout, received: Sequence[_RankResult], folder: Path
) -> PreflightReport:
    facts = [each.facts for each in received]
    ways = [way for each in received for way in each.measured.ways]
    links = TimedLinks([each.machine for each in facts], ways)
    report = PreflightReport(_heading(planned, facts), facts, links, _sums(received), str(folder))
    report.lacking += _lacking(facts)
    report.doubts += _doubts(planned, facts)
    if config.pipeline.is_searched:
        report.doubts.append(
            f"pipeline.layout=auto: train will search for the layout, so this check used another "
            f"one, {_ranks_text(planned.mesh)}; search first (python -m gpipe_hpc.plan "
            f"plan.search=true plan.links={config.preflight.out}) and repeat the preflight"
        )
    report.doubts += slow_texts(links, facts)
    paces = _paces([each.work_s for each in received])
    report.doubts += [
        f"slow rank: rank {rank} on {facts[rank].host} takes {pace:.2f} times as long as the "
        f"fastest for the same work; check the host for other processes and poor cooling, or adapt "
        f"the cut with pipeline.paces=measured"
        for rank, pace in paces.items()
        if pace >= _SLOW_PACE
    ]
    report.written = _write(config, links, facts, paces)
    return report


def _heading(planned: PlannedLayout, facts: Sequence[Facts]) -> str:
    schedule, mesh = planned.layout.schedule, planned.mesh
    hosts = len(host_number(facts))
    return (
        f"preflight of {len(facts)} rank{'s' * (len(facts) > 1)} on {hosts} "
        f"host{'s' * (hosts > 1)}: {_ranks_text(mesh)}, "
        f"{schedule.num_stages} stages, schedule {schedule.name}"
    )


def _ranks_text(mesh: Mesh) -> str:
    return f"{mesh.replicas} x {mesh.stages} ranks"


def _sums(received: Sequence[_RankResult]) -> list[TimedAllReduce]:
    """Return the all-reduce of each group once, with its longest duration on any rank."""
    found: dict[tuple[int, ...], TimedAllReduce] = {}
    for each in (each for one in received for each in one.measured.sums):
        known = found.get(each.ranks)
        found[each.ranks] = each if known is None or known.took_s < each.took_s else known
    return [found[ranks] for ranks in sorted(found)]


def _lacking(facts: Sequence[Facts]) -> list[str]:
    needs: dict[tuple[str, str], MemoryNeed] = {}
    for need in (need for each in facts for need in each.needs):
        key = need.what, need.place
        needs[key] = need if key not in needs else _joined(needs[key], need)
    files = max(each.files for each in facts)
    lacking = [str(need) for need in needs.values() if need.lack_bytes > 0]
    return [*lacking, *([str(files)] if files.lack > 0 else [])]


def _joined(one: MemoryNeed, other: MemoryNeed) -> MemoryNeed:
    """Merge the needs of ranks that share a memory, whether or not they are consecutive."""
    frees = [free for free in (one.free_bytes, other.free_bytes) if free is not None]
    return one._replace(
        ranks=(min(one.ranks[0], other.ranks[0]), max(one.ranks[1], other.ranks[1])),
        needed_bytes=one.needed_bytes + other.needed_bytes,
        free_bytes=min(frees, default=None),
    )


def _doubts(planned: PlannedLayout, facts: Sequence[Facts]) -> list[str]:
    doubts = []
    if planned.ranks is None:
        doubts.append(
            f"memory could not be planned, so it was not compared with the free memory: "
            f"{planned.why_not}"
        )
    attended = (ClockBounds(each.entry, each.exit) for each in facts)
    skew = skew_text(reduce(merge_clock_bounds, attended))
    doubts += [] if skew is None else [skew]
    for what, of in (("Python", "python"), ("device", "device")):
        first = getattr(facts[0], of)
        others = [each for each in facts if getattr(each, of) != first]
        if others:
            ranks = ranges_text(each.rank for each in others)
            doubts.append(
                f"{what}: rank 0 has {first}, but ranks {ranks} ({others[0].host}) have "
                f"{getattr(others[0], of)}; use the same on all ranks if possible"
            )
    machines: dict[str, set[str]] = {}
    for each in facts:
        machines.setdefault(each.host, set()).add(each.machine)
    doubts += [
        f"host name: {len(each)} hosts are called {name}, so messages cannot distinguish them; set "
        f"unique host names"
        for name, each in machines.items()
        if len(each) > 1
    ]
    return doubts


def _paces(work_s: Sequence[float]) -> dict[int, float]:
    """Return the slowdown of each slow rank, from the seconds of the same work on all ranks."""
    if len(work_s) < 2:
        return {}
    return {rank: pace for rank, pace in enumerate(paces_of_times(work_s)) if pace != 1}


def _write(
    config: Config, links: TimedLinks, facts: Sequence[Facts], paces: dict[int, float]
) -> str:
    """Write the cluster file for the planner; return a line about it for the report."""
    cluster, out = links.cluster(paces), config.preflight.out
    if out is None:
        return ""
    if cluster is None:
        return f"{out} was not written, because no two ranks communicate"
    names = [facts[block[0]].host for block in links.blocks()]
    day, most = time.strftime("%Y-%m-%d %H:%M:%S"), bytes_text(MESSAGE_BYTES)
    about = (
        f"Measured by python -m gpipe_hpc.preflight, {day}, with messages of up to {most}.\n"
        f"Other pairs were active. Values are medians; links that differ much are listed apart."
    )
    path = Path(out).absolute()
    write_cluster(path, cluster, names, about)
    return f"cluster file for the planner: {path}"
