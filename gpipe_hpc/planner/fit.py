"""Choose the number of stages for the available ranks: the fastest layout that fits in memory."""

from dataclasses import replace
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.pins import has_valid_cut, read_pins
from gpipe_hpc.planner.forecast import peak_bytes_of_ranks
from gpipe_hpc.planner.layout import Layout, lay_out
from gpipe_hpc.planner.memory.by_rank import excess_bytes, limits_text, memory_limits
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.candidates import numbers_of_stages
from gpipe_hpc.schedule import canonical_schedule, simulate
from gpipe_hpc.units import bytes_text

FIT: Final = "fit"
"""Value of `stages` that requests the best number for the available ranks."""

_WORTH_MORE_STAGES: Final = 0.99  # more stages must save at least 1 % of the time


class Fit(NamedTuple):
    """The best number of stages, the request for that number, and the reason as text."""

    stages: int
    request: Request
    text: str


class _StageTrial(NamedTuple):
    """Simulated time and memory of the layout for one number of stages.

    Attributes:
      nbytes: memory of the rank that needs most; None without memory limits.
      excess: largest number of bytes by which a rank exceeds its limit.
    """

    stages: int
    request: Request
    time: float
    nbytes: int | None
    excess: float


def fit_stages(request: Request, num_ranks: int, cost_model: CostModel) -> Fit:
    """Choose the number of stages and of replicas for a number of ranks.

    The total number of micro-batches stays replicas x microbatches of the request, so each
    micro-batch is the same for any number of ranks. Candidates are numbers of stages from 1 up:
    whole replicas if they divide ranks and micro-batches, else one pipeline with partial replicas.
    The fastest candidate within the memory limits is chosen, simulated with the times of the cost
    model and free communication. If all exceed the limits, the one with the smallest excess is
    chosen. Raises ConfigError if no number of stages works.
    """
    _refuse_what_knows_the_stages(request, num_ranks)
    tried: list[_StageTrial] = []
    refusal: GpipeError | None = None
    pins, unpinned = read_pins(request.pins, cost_model.layers), []
    for stages in numbers_of_stages(min(num_ranks, len(cost_model.layers))):
        try:
            tried.append(_try(request, num_ranks, stages, cost_model))
        except GpipeError as error:
            refusal = refusal or error
            unpinned += [stages] * (not has_valid_cut(pins, len(cost_model.layers), stages))
    if not tried:
        raise ConfigError(
            f"pipeline.stages: no number of stages works for {num_ranks} ranks with these "
            f"settings: {refusal}; set pipeline.stages, or change the setting named here"
        ) from refusal
    best = tried[0]
    for each in tried[1:]:
        less = each.excess - best.excess
        if less < 0 or (less == 0 and each.time < _WORTH_MORE_STAGES * best.time):
            best = each
    text = _text(best, tried, num_ranks)
    if unpinned:
        text += f"; {', '.join(map(str, unpinned))} cannot satisfy pipeline.pins"
    return Fit(best.stages, best.request, text)


def _refuse_what_knows_the_stages(request: Request, num_ranks: int) -> None:
    for name in ("memory_bytes", "paces"):
        value = getattr(request, name)
        if isinstance(value, list | tuple) and len(value) != num_ranks:
            raise ConfigError(
                f"pipeline.{name}: with pipeline.stages=fit it needs one value for each of the "
                f"{num_ranks} ranks, got {list(value)}; correct it, or set pipeline.stages to a "
                f"number"
            )
    if not isinstance(request.partition, str | Partition):
        raise ConfigError(
            f"pipeline.partition: with pipeline.stages=fit it must be a policy, got "
            f"{list(request.partition)} for {len(request.partition)} stages; set pipeline.stages "
            f"to a number, or pipeline.partition=time"
        )
    if not isinstance(request.schedule, str):
        raise ConfigError(
            f"pipeline.stages: fit does not work with a schedule table of your own; set it to "
            f"{request.schedule.num_ranks}"
        )


def _try(request: Request, num_ranks: int, stages: int, cost_model: CostModel) -> _StageTrial:
    asked = on_stages(request, num_ranks, stages)
    # Searching for each number would take minutes, and its gain is similar for all.
    stand_in = asked
    if canonical_schedule(str(asked.schedule)) == "auto":
        options = {n: o for n, o in asked.options.items() if n == "stages"}
        name = "rerouted" if options else "zb_h1"
        stand_in = replace(asked, schedule=name, schedule_options=options)
    layout = lay_out(stand_in, cost_model)
    time = simulate(layout.schedule, layout.partition.likely_costs(layout.recomputed)).makespan
    limits = memory_limits(asked)
    if limits is None:
        return _StageTrial(stages, asked, time, None, 0.0)
    held = _held(layout, asked, cost_model)
    return _StageTrial(stages, asked, time, max(held), excess_bytes(held, limits))


def _held(layout: Layout, request: Request, cost_model: CostModel) -> list[int]:
    return peak_bytes_of_ranks(
        cost_model.count,
        layout.partition.counts,
        layout.schedule,
        request.kept_states,
        layout.recomputed,
        layout.sharing,
    )


def on_stages(request: Request, num_ranks: int, stages: int) -> Request:
    """Return the request with `stages` stages on all ranks and the same total of micro-batches."""
    total = request.replicas * request.microbatches
    rows = num_ranks // stages
    if num_ranks % stages == 0 and total % rows == 0:
        return replace(request, stages=stages, replicas=rows, microbatches=total // rows)
    return request.in_rows(num_ranks, stages, total)


def _text(best: _StageTrial, tried: list[_StageTrial], num_ranks: int) -> str:
    """Describe the chosen number of stages and the reason in one line."""
    numbers = ", ".join(str(each.stages) for each in tried)
    rows = f"{best.request.replicas} replica{'s' * (best.request.replicas > 1)}"
    if best.request.stages != best.stages:
        rows = "pipelines with holes"
    why = f"the fastest of {numbers} in simulation"
    limits = memory_limits(best.request)
    if limits is not None:
        most = limits_text(limits)
        over = [str(each.stages) for each in tried if each.excess]
        held = "" if best.nbytes is None else f" with {bytes_text(best.nbytes)} on the fullest rank"
        if best.excess:
            why = f"none of {numbers} fits in {most}; this one needs the least memory"
        elif over:
            why += f" (with {', '.join(over)} a rank needs more than {most})"
        why += held
    plural = "s" * (best.stages > 1)
    return f"pipeline.stages=fit: {best.stages} stage{plural} on {num_ranks} ranks ({rows}), {why}"
