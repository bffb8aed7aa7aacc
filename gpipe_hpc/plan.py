"""`python -m gpipe_hpc.plan`: report the memory and step time of a run before it starts.

No data is read and no model is allocated, so models of any size are counted in seconds.
plan.search=true, or plan.costs=counted without plan.flops_per_s, measures the speed of this
machine's CPU; plan.costs=measured runs every layer on this machine.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gpipe_hpc.comm.watchdog.output_streams import print_line
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.config import (
    CommandJob,
    ExitCode,
    bind_loss,
    build_target,
    check_planning,
    num_planned_ranks,
    on_ranks,
    print_error,
    run_jobs,
)
from gpipe_hpc.data.shapes import Sample, microbatch, samples_per_microbatch
from gpipe_hpc.device.device import Device, name_here, planned_device
from gpipe_hpc.errors import GpipeError, PartitionError
from gpipe_hpc.models import loss_function, normalise_layers
from gpipe_hpc.planner import (
    FIT,
    CostModel,
    CountedCosts,
    Example,
    Layout,
    MeasuredCosts,
    Partition,
    Request,
    fit_stages,
    lay_out,
)
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.costs.calibration import check_calibration, read_calibration
from gpipe_hpc.planner.costs.cost_models import COUNTED, MEASURED
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.cutting.distance import distance
from gpipe_hpc.planner.forecast import Forecast, least_bytes
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.report.alternatives import (
    StepBatch,
    alternatives_text,
    forecast_of,
    try_alternatives,
)
from gpipe_hpc.planner.report.reductions import reductions_text
from gpipe_hpc.planner.report.tables import Assumptions, Sections, plan_report
from gpipe_hpc.planner.search.machine import Machine
from gpipe_hpc.planner.search.whole_step import step_of
from gpipe_hpc.planner.splitting import gain_of_splitting
from gpipe_hpc.planner.step_time import StepTime
from gpipe_hpc.planner.vocabulary import check_vocabulary
from gpipe_hpc.settings import Config, TokenDataConfig
from gpipe_hpc.trainer.machines import (
    cluster_of,
    doubts_of_prices,
    machine_of,
    notes_of_calibration,
    process_bytes_of,
    rates_of,
    slow_once,
    with_process,
)
from gpipe_hpc.trainer.measuring.rank_emulation import (
    measured_under_load,
    on_threads,
    share_of_rank,
)
from gpipe_hpc.trainer.pipeline_request import request_of
from gpipe_hpc.trainer.search.answer import compared
from gpipe_hpc.units import bytes_text

DEFAULT_STAGES: Final = 4
TOO_LARGE_EXIT_CODE: Final = 3
_OTHERS_S: Final = (
    10.0  # time limit for trying other settings if the given ones do not fit in memory
)


class Plan(NamedTuple):
    """A planned layout with its forecast of memory and step time.

    Args:
        layout: The layout.
        model: FLOPs, parameters and activations of the model.
        forecast: Memory of each rank.
        text: The report.
        fits: Whether every rank has enough memory.
        step: Times of a step; None if the speed of ranks is unknown.
    """

    layout: Layout
    model: ModelCount
    forecast: Forecast
    text: str
    fits: bool
    step: StepTime | None = None


def main() -> None:
    """Compose the settings from the command line, plan, and exit.

    Exit codes: 0 done, 1 failed, 2 settings that cannot work, 3 a rank needs more memory than
    pipeline.memory_bytes. A sweep (-m) exits with the first code that is not 0.
    """
    sys.exit(run_jobs(_task, "plan"))


def _task(job: CommandJob) -> int:
    try:
        if job.config.plan.search or job.config.pipeline.is_searched:
            answer = compared(job.config, job.words)
            print(answer.text)
            return ExitCode.DONE if answer.chosen else TOO_LARGE_EXIT_CODE
        found = make_plan(job.config)
    except GpipeError as error:
        return print_error(error)
    print(found.text)
    return ExitCode.DONE if found.fits else TOO_LARGE_EXIT_CODE


def make_plan(config: Config) -> Plan:
    """Count the model, partition it, and forecast memory and time of a step.

    Raises ConfigError, ModelError, PartitionError or ScheduleError for settings that cannot work.
    """
    is_fit = config.pipeline.stages == FIT
    doubts = check_planning(config, None if is_fit else config.pipeline.stages or DEFAULT_STAGES)
    all_ranks = num_planned_ranks(config, DEFAULT_STAGES)
    given_microbatches = config.pipeline.microbatches
    config = on_ranks(config, all_ranks)
    layers = normalise_layers(build_target("model", config.model))
    if isinstance(config.data, TokenDataConfig):
        holds_bytes = config.data.holds_bytes
        check_vocabulary(layers, config.data.num_tokens, holds_bytes=holds_bytes)
    sample = microbatch(config.data, samples_per_microbatch(config))
    loss_fn: Callable[[Any, Any], Any] = (
        bind_loss(config.loss) if config.loss else loss_function(sample.loss)
    )
    request = request_of(config)
    if not is_fit:
        mesh = Mesh.fit(all_ranks, config.pipeline.stages, config.pipeline.num_replicas)
        request = replace(request, stages=mesh.stages)
    device = planned_device(config.train.device)
    request = with_process(request, process_bytes_of(config, device), device)
    request = _with_known_paces(request, config, all_ranks)
    example = Example(sample.inputs, sample.targets, loss_fn, request.seed, device)
    counted = CountedCosts(layers, example, request.precision, shares_casts=not request.offload)
    cost_model: CostModel = counted
    if config.plan.calibration is not None:
        cost_model, more = _calibrated(config.plan.calibration, counted, device)
        doubts = [*doubts, *more]
    elif config.plan.measures_layers:
        share = share_of_rank(config, device, all_ranks)
        cost_model = measured_under_load(config, counted, samples_per_microbatch(config), share)
    fit = fit_stages(request, all_ranks, cost_model) if is_fit else None
    if fit is not None:
        request = fit.request
    layout = _lay_out(request, cost_model)
    counts = layout.partition.counts
    found = forecast_of(layout, request, cost_model, config.train.batch_size)
    limits = memory_limits(request)
    assumptions = Assumptions(
        config.plan.flops_per_s,
        limits,
        config.pipeline.recompute,
        can_cut=samples_per_microbatch(config) > 1,
    )
    if limits is not None and _may_help(found, limits):
        others = _others(config, request, counted, given_microbatches)
        assumptions = replace(assumptions, others=others)
    machine = _machine(config, request, device, layout)
    doubts = [*doubts, *doubts_of_prices(config, device)]
    if machine is not None:
        priced = machine.priced(cost_model)
        step = step_of(layout, priced, machine, request.combining, config.train.batch_size)
        assumptions = replace(assumptions, step=step, measured=_layers_as(cost_model))
    sections = Sections(
        heading="\n".join(
            [
                *_heading(config, cost_model, layout, sample),
                *([] if fit is None else [fit.text]),
                *filter(None, [gain_of_splitting(request, layout, cost_model)]),
                *map(_warning, doubts),
                *notes_of_calibration(config),
            ]
        ),
        cut_by=_cut_by(config, layout.partition),
        searched=layout.searched,
        recomputed=layout.budget,
        paces=layout.partition.stage_paces,
        pins=layout.partition.pins,
        distance=_distance_text(layout, cost_model.count),
        summed=reductions_text(
            cost_model.count, layout, request.combining, config.plan.link_bytes_per_s
        ),
    )
    text = plan_report(
        layers, cost_model.count, counts, layout.schedule, found, assumptions, sections
    )
    return Plan(
        layout, cost_model.count, found, text, all(assumptions.fit(found.ranks)), assumptions.step
    )


def _distance_text(layout: Layout, model: ModelCount) -> str:
    """Describe how far the partition is from the best one, by its own costs or by FLOPs."""
    partition, placement = layout.partition, layout.schedule.placement
    if placement.num_ranks == 1:
        return ""
    flops = [float(count.flops) for count in model.layers]
    found = distance(partition, placement, partition.costs if partition.times else flops)
    measure = partition.measure if partition.times else COUNTED
    return "" if found is None else f"by {measure}, {found.text()}"


def _calibrated(path: str, counted: CountedCosts, device: Device) -> tuple[KnownCosts, list[str]]:
    """Return layer costs with the times that a run measured, and warnings.

    Raises ConfigError if the file was written by a run of another model.
    """
    found, count = read_calibration(path), counted.count
    doubts = check_calibration(
        found,
        path,
        count,
        device=device.type,
        name=name_here(device),
        precision=counted.precision,
    )
    return KnownCosts(counted.layers, found.layers, count), doubts


def _with_known_paces(request: Request, config: Config, num_ranks: int) -> Request:
    """Return a request whose slowdowns are those of plan.links if they were to be measured."""
    if not isinstance(request.paces, str) or config.plan.links is None:
        return request
    known = cluster_of(config, num_ranks).paces
    paces = [known.get(rank, 1.0) for rank in range(num_ranks)] if known else None
    return replace(request, paces=paces)


def _machine(config: Config, request: Request, device: Device, layout: Layout) -> Machine | None:
    """Return speed, links and overheads of the ranks; None if their speed is unknown."""
    plan = config.plan
    if plan.costs is None and plan.flops_per_s is None and plan.calibration is None:
        return None
    is_measured = plan.measures_layers or plan.calibration is not None
    num_ranks = layout.replicas * layout.schedule.num_ranks
    with on_threads(share_of_rank(config, device, num_ranks)):
        rates = Rates.alike(1.0) if is_measured else rates_of(config, device)
    paces: Sequence[float] = ()
    if request.paces is not None and not isinstance(request.paces, str):
        paces = [float(pace) for pace in request.paces]
    known = cluster_of(config, num_ranks)
    cluster = slow_once(known, paces, 1.0 if is_measured or not paces else paces[0])
    return machine_of(config, device, cluster, rates, plan.host_copy_bytes_per_s)


def _warning(doubt: str) -> str:
    return f"Warning: {doubt.removeprefix('config: ')}"


def _lay_out(request: Request, cost_model: CostModel) -> Layout:
    """Return the layout of a run; if none fits in memory, the one that needs the least."""
    if request.schedule == "auto":
        hopeless = _without_search(request, cost_model)
        if hopeless is not None:
            return hopeless
        print_line(
            f"plan: searching for an order of {request.microbatches} micro-batches on "
            f"{request.stages} ranks (pipeline.schedule=auto), which may take minutes; a smaller "
            f"pipeline.options.trials, such as 0, takes less time"
        )
    try:
        return lay_out(request, cost_model)
    except PartitionError as error:
        if request.recompute != "budget":
            raise
        least = lay_out(replace(request, recompute="except_last"), cost_model)
        return replace(least, budget=str(error))


def _without_search(request: Request, cost_model: CostModel) -> Layout | None:
    """Return a layout with one_f_one_b, without a search, if no schedule can fit in memory.

    Returns None if a schedule may fit, and for placements with several stages per rank.
    """
    limits = memory_limits(request)
    if limits is None or "placement" in request.options:
        return None
    found = lay_out(
        replace(request, schedule="one_f_one_b", schedule_options=None, recompute="always"),
        cost_model,
    )
    held = least_bytes(
        cost_model.count,
        found.partition.counts,
        found.schedule.placement,
        request.kept_states,
        found.sharing,
    )
    rank = max(range(len(held)), key=lambda at: held[at].total_bytes - limits[at])
    least = held[rank]
    if least.total_bytes <= limits[rank]:
        return None
    said = (
        f"no order fits: in addition to {bytes_text(least.lasting_bytes)} of weights, gradients, "
        f"optimizer and workspace, one micro-batch needs {bytes_text(least.activation_bytes)} on "
        f"rank {rank}, but pipeline.memory_bytes allows {bytes_text(limits[rank])}; no order was "
        f"searched, the plan shows one_f_one_b with recompute=always"
    )
    return replace(found, budget=said)


def _may_help(found: Forecast, limits: Sequence[float]) -> bool:
    """Return whether less activation memory would suffice for all ranks to fit.

    That is, a rank exceeds its limit, but every rank fits without activations.
    """
    held = [rank.total_bytes for rank in found.ranks]
    lasting = [rank.total_bytes - rank.activation_bytes for rank in found.ranks]
    return excess_bytes(lasting, limits) == 0 < excess_bytes(held, limits)


def _others(
    config: Config, request: Request, cost_model: CountedCosts, given_microbatches: int
) -> str:
    """Try some other settings; describe those that fit in memory.

    Args:
        config: The settings on the ranks.
        request: The requested layout.
        cost_model: The counted layers.
        given_microbatches: pipeline.microbatches as given by the user.
    """

    def cost_model_of(times: int) -> CostModel:
        if times == 1:
            return cost_model
        assert cost_model.example is not None, "a plan has an example micro-batch"
        microbatches = config.pipeline.microbatches * times
        pipeline = replace(config.pipeline, microbatches=microbatches)
        num_samples = samples_per_microbatch(replace(config, pipeline=pipeline))
        sample = microbatch(config.data, num_samples)
        example = cost_model.example._replace(inputs=sample.inputs, targets=sample.targets)
        return replace(cost_model, example=example)

    batch = StepBatch(config.train.batch_size, given_microbatches)
    tried = try_alternatives(request, batch, cost_model_of, _OTHERS_S)
    return alternatives_text(tried, config.plan.flops_per_s)


def _layers_as(cost_model: CostModel) -> str:
    """Describe the source of layer times; empty if they are counted."""
    if cost_model.measure != MEASURED:
        return ""
    return (
        cost_model.how if isinstance(cost_model, MeasuredCosts) else "layers as measured by a run"
    )


def _cut_by(config: Config, partition: Partition) -> str:
    """Describe how layers were assigned to stages."""
    said = _weighed_by(config, partition)
    return f"{said}; the fastest cut found in simulation" if partition.made_on else said


def _weighed_by(config: Config, partition: Partition) -> str:
    if isinstance(config.pipeline.partition, list):
        return "by hand"
    if partition.measure == MEASURED and config.plan.calibration is not None:
        return "by time, as measured by a run (plan.calibration)"
    if partition.measure == MEASURED:
        return "by time, measured here (plan.costs=measured)"
    if partition.measure != COUNTED:
        return "by parameters" if partition.measure == "parameters" else "uniformly by layers"
    if not any(partition.costs):
        return "uniformly by layers, because no layer has counted FLOPs"
    return (
        "by counted FLOPs (pipeline.partition=time measures on the machine that trains; the cut "
        "may differ)"
    )


def _heading(config: Config, cost_model: CostModel, layout: Layout, sample: Sample) -> list[str]:
    """Return lines that describe the planned run and its assumptions."""
    pipeline, train = config.pipeline, config.train
    ranks, stages = layout.schedule.num_ranks, layout.schedule.num_stages
    shape = "x".join(map(str, sample.inputs.shape))
    dtype = str(sample.inputs.dtype).removeprefix("torch.")
    data = type(config.data).__name__.removesuffix("Config")
    one = f"{ranks} ranks, {stages} stages"
    if not pipeline.stages:
        one += (
            f" (pipeline.stages is not set, so {DEFAULT_STAGES} ranks are assumed; a run uses "
            f"all of its ranks)"
        )
    if layout.replicas > 1:
        one = f"{layout.replicas * ranks} ranks: {layout.replicas} replicas of {one}; one is shown"
        if not layout.portions.are_equal:
            counts = ", ".join(map(str, layout.portions.counts))
            one += f", the one with most micro-batches (the replicas have {counts})"
    return [
        f"{len(cost_model.layers)} layers, {cost_model.count.parameters:,} parameters",
        one,
        f"micro-batch {dtype}[{shape}] ({bytes_text(sum(cost_model.count.inputs.tensors))}) of "
        f"data {data} (shapes only, no data is read), train.batch_size={train.batch_size}",
        f"{train.precision}, recompute {pipeline.recompute}, "
        f"{'offload, ' * pipeline.offload}kernels as on {planned_device(config.train.device).type}",
    ]


if __name__ == "__main__":
    main()
