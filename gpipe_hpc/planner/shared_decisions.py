"""Decisions that all ranks of a world share: slowdowns of ranks, number of stages, layout."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gpipe_hpc.comm.watchdog.heartbeat import run_here_with_heartbeat, run_with_heartbeat
from gpipe_hpc.comm.world.groups import RankContext
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.costs.speed import confirms, paces_of_times, paces_text, seconds_of_work
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.fit import FIT, fit_stages, on_stages
from gpipe_hpc.planner.layout import Layout, cut, lay_out
from gpipe_hpc.planner.layout_broadcast import broadcast_layout
from gpipe_hpc.planner.memory.by_rank import MEASURED_PACES, MeasuredSlowdowns, given_paces
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.splitting import gain_of_splitting
from gpipe_hpc.schedule import num_rows, rows_text

log = logging.getLogger("gpipe_hpc.pipeline")


def with_open_choices(
    request: Request, world: World, cost_model: CostModel, timeout_s: float
) -> Request:
    """Return the request with rank slowdowns measured and a number of stages chosen, if requested.

    Collective: every rank calls it and gets the same result, except that only rank 0 knows the
    slowdowns of all ranks. `timeout_s`: how long a rank may wait while rank 0 chooses.
    """
    if request.paces == MEASURED_PACES:
        request = _with_measured_paces(request, world)
    if request.stages == FIT:
        request = _with_fitting_stages(request, world, cost_model, timeout_s)
    return request


def decide_layout(
    request: Request, context: RankContext, cost_model: CostModel, timeout_s: float
) -> Layout:
    """Compute the layout on rank 0 and return it on all ranks; collective.

    Only rank 0 measures layers and needs an example. Rank 0 gets the schedule rows of all ranks,
    each other rank only its own row. `timeout_s`: how long a rank may wait for rank 0.
    """
    world = context.world

    def measure() -> Callable[[], Layout]:
        return partial(_laid_out, replace(request, partition=cut(request, cost_model)), cost_model)

    # Layers are measured on the thread that will run them: another one has other malloc arenas
    # and torch settings. Both this and a search may take long.
    search = run_here_with_heartbeat(
        world, "start", measure if world.rank == 0 else None, idle_s=timeout_s
    )
    if world.rank == 0 and request.schedule == "auto":
        log.info("searching for a schedule ...")
    decided = run_with_heartbeat(world, "laying out", search)
    with collective_errors(world, "start"):
        layout = broadcast_layout(
            decided,
            world.rank,
            context.mesh,
            context.world_group,
            context.pipeline,
            context.dp_group,
        )
    if world.rank == 0:
        recut_text = _recut_text(request.partition, layout.partition)
        texts = rows_text(layout.schedule.placement), recut_text, layout.searched, layout.budget
        for text in filter(None, texts):
            log.info("%s", text)
    return layout


def _laid_out(request: Request, cost_model: CostModel) -> Layout:
    """Compute the layout; for partial replicas, add a text about the gain of split backwards."""
    layout = lay_out(request, cost_model)
    return replace(
        layout, searched=layout.searched or gain_of_splitting(request, layout, cost_model)
    )


def _recut_text(before: object, now: Partition) -> str:
    """Describe how an earlier partition was adapted to other ranks; empty if it was not."""
    if not isinstance(before, Partition) or before.costs != now.costs:
        return ""
    if before.num_ranks == now.num_ranks:
        return ""
    made_for, ranks = (
        "equal numbers of ranks per stage" if each.num_ranks is None else f"{each.num_ranks} ranks"
        for each in (before, now)
    )
    layers, are_now = (", ".join(map(str, each.counts)) for each in (before, now))
    return (
        f"partition: the cut into {layers} layers was made for {made_for}; the model is now cut "
        f"into {are_now} layers for {ranks}, with the same layer costs (not measured again)"
    )


def _with_measured_paces(request: Request, world: World) -> Request:
    """Measure the speed of every rank; return the request with the slowdown of each on rank 0.

    Slowdowns stored with a checkpoint's partition are kept if the measurement agrees with them.
    """
    if world.size == 1:
        return replace(request, paces=None)
    stages = request.stages if isinstance(request.stages, int) else None
    has_holes = num_rows(world.size, stages, request.replicas) is not None
    with collective_errors(world, "measuring the speed of ranks"):
        if request.stages != FIT and not has_holes:
            Mesh.fit(world.size, stages, request.replicas)  # raises if it is impossible
        own = seconds_of_work(world.device, request.precision)
        times = world.world_group.gather_object(own, root=0)
        found: Sequence[float] = ()
        if times is not None:
            measured = paces_of_times(times)
            log.info("paces: %s", paces_text(measured))
            found = _kept_paces(replace(request, paces=measured), world.size)
    return replace(request, paces=MeasuredSlowdowns(found))


def _kept_paces(request: Request, num_ranks: int) -> Sequence[float]:
    """Return the slowdowns stored with the partition, or the measured ones if they differ."""
    measured, before = request.paces, request.partition
    assert measured is not None and not isinstance(measured, str), "they were measured"
    if not isinstance(before, Partition) or not before.rank_paces or request.stages == FIT:
        return measured
    stages = request.stages or num_ranks // request.replicas
    now = given_paces(replace(request, stages=stages).on(num_ranks))
    if now is not None and confirms(now, before.rank_paces):
        return before.rank_paces
    log.warning(
        "paces: the relative speeds of ranks have changed since the cut was made (%s); the model "
        "is cut again",
        paces_text(before.rank_paces),
    )
    return measured


def _with_fitting_stages(
    request: Request, world: World, cost_model: CostModel, timeout_s: float
) -> Request:
    """Return the request with the number of stages that rank 0 finds best for the ranks."""

    def choose() -> tuple[int, str]:
        found = fit_stages(request, world.size, cost_model)
        return found.stages, found.text

    leads = world.rank == 0
    found = run_here_with_heartbeat(
        world, "choosing the stages", choose if leads else None, idle_s=timeout_s
    )
    with collective_errors(world, "start"):
        stages, text = world.world_group.broadcast_object(found, root=0)
        if leads:
            log.info("%s", text)
        return on_stages(request, world.size, stages)
