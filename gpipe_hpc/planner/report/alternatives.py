"""Find settings that fit in memory if a plan does not, by forecasting a few of them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from gpipe_hpc.errors import GpipeError
from gpipe_hpc.planner.costs.cost_models import CostModel
from gpipe_hpc.planner.forecast import Forecast, forecast
from gpipe_hpc.planner.layout import Layout, lay_out
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.report.columns import aligned
from gpipe_hpc.planner.request import Request
from gpipe_hpc.planner.shares import microbatch_shares
from gpipe_hpc.units import bytes_text, flops_text

_TIMES_THE_MICROBATCHES: Final = (1, 2, 4)
_MOST_SHOWN: Final = 5


class StepBatch(NamedTuple):
    """Number of samples of a step, and the value of pipeline.microbatches."""

    num_samples: int
    given_microbatches: int


@dataclass(frozen=True)
class Alternative:
    """Settings to copy, with the bytes of the rank that needs most and the step time in FLOPs.

    `excess_bytes`: largest number of bytes by which a rank exceeds its limit.
    """

    overrides: str
    most_bytes: int
    excess_bytes: float
    makespan: float


class TriedAlternatives(NamedTuple):
    """The alternatives that were tried, and whether all candidates were tried in time."""

    found: tuple[Alternative, ...]
    is_all: bool = True


def forecast_of(
    layout: Layout, request: Request, cost_model: CostModel, num_samples: int
) -> Forecast:
    """Forecast a step of a layout's replica with the most micro-batches."""
    own = layout.portions.of(layout.portions.fullest)
    return forecast(
        cost_model.count,
        layout.partition.counts,
        layout.schedule,
        request.kept_states,
        layout.recomputed,
        microbatch_shares(num_samples, layout.portions.total, own),
        layout.sharing,
        layout.partition.rank_paces,
    )


def try_alternatives(
    request: Request, batch: StepBatch, cost_model_of: Callable[[int], CostModel], seconds: float
) -> TriedAlternatives:
    """Lay out and forecast a few settings that differ from those of a request.

    These are more micro-batches if the batch has enough samples, ``one_f_one_b``, and
    recomputation, in all valid combinations; schedules are not searched. `cost_model_of` returns
    the counts if micro-batches are as many times smaller as its argument. Stops after `seconds`.
    """
    began_s = time.perf_counter()
    cost_models: dict[int, CostModel] = {}
    found: list[Alternative] = []
    for times, asked in _others(request, batch):
        if time.perf_counter() - began_s > seconds:
            return TriedAlternatives(tuple(found), is_all=False)
        try:
            cost_model = cost_models.get(times) or cost_models.setdefault(
                times, cost_model_of(times)
            )
            step = forecast_of(lay_out(asked, cost_model), asked, cost_model, batch.num_samples)
        except GpipeError:
            continue  # these settings cannot work together, or a budget fits nothing
        held = [rank.total_bytes for rank in step.ranks]
        overrides = _overrides(request, asked, batch)
        excess = excess_bytes(held, memory_limits(asked))
        found.append(Alternative(overrides, max(held), excess, step.timeline.makespan))
    return TriedAlternatives(tuple(found))


def _others(request: Request, batch: StepBatch) -> Iterator[tuple[int, Request]]:
    """Yield (factor on the number of micro-batches, request), the smallest changes first."""
    schedules = [request.schedule] if request.schedule != "auto" else []
    if not request.options and request.schedule != "one_f_one_b":
        schedules.append("one_f_one_b")  # the options of one schedule are not those of another
    ways = [request.recompute]
    ways += [way for way in ("budget", "always") if way != request.recompute]
    for times in _TIMES_THE_MICROBATCHES:
        microbatches = times * request.microbatches
        if times > 1 and microbatches * request.replicas > batch.num_samples:
            return  # some would have no sample
        for schedule in schedules:
            for recompute in ways:
                asked = replace(
                    request, microbatches=microbatches, schedule=schedule, recompute=recompute
                )
                if asked != request:
                    yield times, asked


def _overrides(request: Request, asked: Request, batch: StepBatch) -> str:
    """Return the changed settings as written on a command line."""
    changed = []
    if asked.microbatches != request.microbatches:
        times = asked.microbatches // request.microbatches
        changed.append(f"pipeline.microbatches={times * batch.given_microbatches}")
    if asked.schedule != request.schedule:
        changed.append(f"pipeline.schedule={asked.schedule}")
    if asked.recompute != request.recompute:
        changed.append(f"pipeline.recompute={asked.recompute}")
    return " ".join(changed)


def alternatives_text(tried: TriedAlternatives, flops_per_s: float | None) -> str:
    """List the alternatives that fit, the fastest first, or the one that exceeds memory least."""
    more = "" if tried.is_all else "; not all were tried, because of the time limit"
    if not tried.found:
        return f"nothing else was tried{more}"
    fitting = sorted(
        (each for each in tried.found if not each.excess_bytes),
        key=lambda each: (each.makespan, each.most_bytes),
    )
    if not fitting:
        least = min(tried.found, key=lambda each: (each.excess_bytes, each.most_bytes))
        return (
            f"none of {len(tried.found)} other settings fits{more}; {least.overrides} needs the "
            f"least memory, {bytes_text(least.most_bytes)} on the fullest rank, "
            f"{bytes_text(least.excess_bytes)} too much; use more stages, or a smaller model"
        )
    head = f"{len(fitting)} of {len(tried.found)} other settings fit, the fastest first{more}:"
    rows = [
        [f"fits: {each.overrides}", bytes_text(each.most_bytes), _time_text(each, flops_per_s)]
        for each in fitting[:_MOST_SHOWN]
    ]
    return "\n".join([head, aligned([_HEAD, *rows], left={0})])


_HEAD: Final = ["", "fullest rank", "a step"]


def _time_text(each: Alternative, flops_per_s: float | None) -> str:
    if flops_per_s is None:
        return f"as long as {flops_text(each.makespan)} on one rank"
    return f"{each.makespan / flops_per_s:.4g} s"
