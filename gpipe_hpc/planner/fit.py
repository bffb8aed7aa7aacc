"""Choose the stages for the ranks that came: the fastest layout that fits into memory."""

from dataclasses import replace
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.planner.costs.gauges import Gauge
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.pins import holds, read_pins
from gpipe_hpc.planner.forecast import held_bytes
from gpipe_hpc.planner.layout import Layout, lay_out
from gpipe_hpc.planner.memory.by_rank import excess_bytes, limits_text, memory_limits
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.search.candidates import numbers_of_stages
from gpipe_hpc.schedule import canonical_schedule, simulate
from gpipe_hpc.units import bytes_text

FIT: Final = "fit"
"""In the place of a number of stages: as many as are best for the ranks that came."""

_WORTH_MORE_STAGES: Final = 0.99  # of the time with fewer


class Fit(NamedTuple):
    """How many stages are best, the request for them, and why, in words."""

    stages: int
    request: Request
    text: str


class _Tried(NamedTuple):
    """What a layout of so many stages takes and holds; `nbytes` None where nobody asks.

    `excess`: the bytes that the rank has too many which lacks most.
    """

    stages: int
    request: Request
    time: float
    nbytes: int | None
    excess: float


def fit_stages(request: Request, num_ranks: int, gauge: Gauge) -> Fit:
    """Choose the stages, and how many pipelines of them, for so many ranks.

    The micro-batches of all pipelines stay replicas x microbatches of the request, so whatever
    ranks come, each micro-batch is the same. Tried are numbers of stages from 1 up: whole replicas
    where these divide ranks and micro-batches, else one pipeline with holes. The fastest, simulated
    for what the gauge says without transfers and sums of gradients, is chosen among those that keep
    within `memory_bytes`; if none does, that which needs least. Raises ConfigError where no number
    of stages works.
    """
    _refuse_what_knows_the_stages(request, num_ranks)
    tried: list[_Tried] = []
    refusal: GpipeError | None = None
    pins, unpinned = read_pins(request.pins, gauge.layers), []
    for stages in numbers_of_stages(min(num_ranks, len(gauge.layers))):
        try:
            tried.append(_try(request, num_ranks, stages, gauge))
        except GpipeError as error:
            refusal = refusal or error
            unpinned += [stages] * (not holds(pins, len(gauge.layers), stages))
    if not tried:
        raise ConfigError(
            f"pipeline.stages: none fits {num_ranks} ranks with these settings, expected one at "
            f"least, got: {refusal}; give a number of stages, or change what it names"
        ) from refusal
    best = tried[0]
    for each in tried[1:]:
        less = each.excess - best.excess
        if less < 0 or (less == 0 and each.time < _WORTH_MORE_STAGES * best.time):
            best = each
    text = _text(best, tried, num_ranks)
    if unpinned:
        text += f"; {', '.join(map(str, unpinned))} cannot hold pipeline.pins"
    return Fit(best.stages, best.request, text)


def _refuse_what_knows_the_stages(request: Request, num_ranks: int) -> None:
    for name in ("memory_bytes", "paces"):
        value = getattr(request, name)
        if isinstance(value, list | tuple) and len(value) != num_ranks:
            raise ConfigError(
                f"pipeline.{name}: expected a value for each of the {num_ranks} ranks where the "
                f"stages are to be found (pipeline.stages=fit), got {list(value)}; give as many, "
                f"or set pipeline.stages"
            )
    if not isinstance(request.partition, str | Partition):
        raise ConfigError(
            f"pipeline.partition: expected a policy where the stages are to be found "
            f"(pipeline.stages=fit), got {list(request.partition)}, which has "
            f"{len(request.partition)}; set pipeline.stages, or pipeline.partition=time"
        )
    if not isinstance(request.schedule, str):
        raise ConfigError(
            f"pipeline.stages: expected a number for a table of your own, got fit; give "
            f"{request.schedule.num_ranks}"
        )


def _try(request: Request, num_ranks: int, stages: int, gauge: Gauge) -> _Tried:
    asked = on_stages(request, num_ranks, stages)
    # A search for each would take minutes; what it brings is alike for all of them.
    stand_in = asked
    if canonical_schedule(str(asked.schedule)) == "auto":
        options = {n: o for n, o in asked.options.items() if n == "stages"}
        name = "rerouted" if options else "zb_h1"
        stand_in = replace(asked, schedule=name, schedule_options=options)
    layout = lay_out(stand_in, gauge)
    time = simulate(layout.schedule, layout.partition.likely_costs(layout.recomputed)).makespan
    limits = memory_limits(asked)
    if limits is None:
        return _Tried(stages, asked, time, None, 0.0)
    held = _held(layout, asked, gauge)
    return _Tried(stages, asked, time, max(held), excess_bytes(held, limits))


def _held(layout: Layout, request: Request, gauge: Gauge) -> list[int]:
    return held_bytes(
        gauge.count,
        layout.partition.counts,
        layout.schedule,
        request.kept_states,
        layout.recomputed,
        layout.sharing,
    )


def on_stages(request: Request, num_ranks: int, stages: int) -> Request:
    """Return the request for so many stages on all ranks, with the same micro-batches in all."""
    total = request.replicas * request.microbatches
    rows = num_ranks // stages
    if num_ranks % stages == 0 and total % rows == 0:
        return replace(request, stages=stages, replicas=rows, microbatches=total // rows)
    return request.in_rows(num_ranks, stages, total)


def _text(best: _Tried, tried: list[_Tried], num_ranks: int) -> str:
    """Say in one line what was chosen, and why."""
    numbers = ", ".join(str(each.stages) for each in tried)
    rows = f"{best.request.replicas} replica{'s' * (best.request.replicas > 1)}"
    if best.request.stages != best.stages:
        rows = "pipelines with holes"
    why = f"the fastest, simulated, of {numbers}"
    limits = memory_limits(best.request)
    if limits is not None:
        most = limits_text(limits)
        over = [str(each.stages) for each in tried if each.excess]
        held = "" if best.nbytes is None else f" with {bytes_text(best.nbytes)} on the fullest rank"
        if best.excess:
            why = f"none of {numbers} fits {most}; this one needs least"
        elif over:
            why += f" (with {', '.join(over)} a rank needs more than {most})"
        why += held
    plural = "s" * (best.stages > 1)
    return f"pipeline.stages=fit: {best.stages} stage{plural} on {num_ranks} ranks ({rows}), {why}"
