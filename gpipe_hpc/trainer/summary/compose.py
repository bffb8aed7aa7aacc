"""Compose and write ``summary.json``, the report of a run; see docs/reference/summary.md."""

import json
import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc import __version__
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.advice import MOST_ACTIONS
from gpipe_hpc.planner.costs.cost_models import MEASURED
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.run_forecast import shares_of
from gpipe_hpc.planner.search.whole_step import step_of
from gpipe_hpc.planner.step_time import StepTime
from gpipe_hpc.schedule import Timeline, simulate
from gpipe_hpc.trainer.figures.throughput import (
    device_flops_per_s,
    model_flops_per_s,
    share_of_peak,
    tokens_per_sample,
)
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.machines import cluster_of, machine_of, slow_once
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.summary.balance import balance
from gpipe_hpc.trainer.summary.figures import RankFigures, idle_of_ranks
from gpipe_hpc.trainer.summary.ledger import RunStatistics

log = logging.getLogger("gpipe_hpc.train")

SUMMARY_FILE: Final = "summary.json"
_FORMAT: Final = 1
_MOST_ACTIONS_IN_HASTE: Final = 5_000
_DEFINITION: Final = (
    "idle time of all ranks over their total time, from the first action of any rank to the end of "
    "the last"
)


class RunOutcome(NamedTuple):
    """Outcome of a run (running, done, stopped or failed), with the error of a failed one."""

    outcome: str
    error: str | None = None


class MedianTrace(NamedTuple):
    """The median of the traced steps: a timeline for each replica, on a common clock.

    `file` is the path of its trace in the run folder.
    """

    step: int
    pipeline_s: float
    replicas: Sequence[Timeline]
    file: str


def compose_summary(
    session: Session,
    ledger: RunStatistics,
    ended: RunOutcome,
    ranks: Sequence[RankFigures],
    traced: MedianTrace | None,
    planned: StepTime | None,
) -> dict[str, Any]:
    """Return the content of the summary, on rank 0.

    Args:
        session: the run.
        ledger: times and losses of its steps.
        ended: its outcome.
        ranks: measurements of the ranks that could be queried, at least of rank 0.
        traced: the median of the traced steps, if any.
        planned: the step as predicted before the run.
    """
    pipe, config = session.pipe, session.config
    can_differ = not config.pipeline.normalise_over_replicas
    # If a run failed, only rank 0's measurements are available.
    computed_s = [each.computed_s for each in ranks] if len(ranks) == pipe.world.size else ()
    better = balance(computed_s, pipe.layout.portions) if can_differ else None
    return {
        "format": _FORMAT,
        "outcome": ended.outcome,
        "error": ended.error,
        "run": session.run_name,
        "began": _moment(ledger.began_s),
        "written": _moment(time.time()),
        "first_step": ledger.first_step,
        "last_step": pipe.steps_done,
        "steps_asked": last_step(config.train),
        "layout": {
            "ranks": pipe.world.size,
            "stages": pipe.schedule.num_stages,
            "replicas": pipe.mesh.replicas,
            "schedule": pipe.schedule.name,
            "microbatches": pipe.layout.portions.most,
            "microbatches_of_replicas": list(pipe.layout.portions.counts),
            "recompute": config.pipeline.recompute,
            "layers_of_stages": list(pipe.partition.counts),
            "partition": pipe.partition.measure,
            "paces": list(pipe.partition.rank_paces),
        },
        "loss": {
            "first": ledger.first_loss,
            "last": ledger.last_loss,
            "validation": ledger.validation_loss,
        },
        "throughput": _throughput(session, ledger),
        "step": ledger.medians(),
        "expected": planned
        and {
            "pipeline_s": planned.timeline.makespan,
            "bubble": planned.timeline.bubble,
            "step_s": planned.total_s,
        },
        "balance": None if better is None else better._asdict(),
        "bubble_definition": _DEFINITION,
        "stalls_s": ledger.stalls_s,
        "traced_step": None if traced is None else _traced(traced),
        "peak_memory_meaning": _peak_meaning(pipe.world.device),
        "ranks": _ranks(session, ranks, traced),
        "layers": None if session.foreseen is None else session.foreseen.layers(),
        "versions": _versions(),
        "advice": [] if traced is None else _advice(session, traced, ended),
    }


def _peak_meaning(device: Device) -> str:
    """Describe what peak memory counts: tensors on an accelerator, the whole process on a CPU."""
    if device.is_accelerator:
        return "peak memory of the rank's tensors on its device"
    return "peak resident memory of the rank's process, including interpreter and libraries"


def write_summary(run_folder: Path, summary: dict[str, Any]) -> Path:
    """Write the summary atomically; return its path."""
    path = run_folder / SUMMARY_FILE
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(_finite(summary), indent=1, allow_nan=False) + "\n", "utf-8")
    os.replace(aside, path)
    return path


def _versions() -> dict[str, str]:
    return {
        "gpipe_hpc": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": platform.platform(),
    }


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))


def _throughput(session: Session, ledger: RunStatistics) -> dict[str, Any]:
    samples_per_s = ledger.samples_per_s
    tokens = tokens_per_sample(session.config.data)
    tokens_per_s = None
    if samples_per_s is not None and tokens is not None:
        tokens_per_s = samples_per_s * tokens
    return {
        "samples_per_s": samples_per_s,
        "tokens_per_s": tokens_per_s,
        "model_flops_per_s": model_flops_per_s(session, samples_per_s),
        "device_flops_per_s": device_flops_per_s(session),
        "share_of_peak": share_of_peak(session, samples_per_s),
    }


def expected_step(session: Session) -> StepTime | None:
    """Simulate a step with the layer times measured before the run; None if none were measured.

    The step is that of the replica with the most micro-batches. It is simulated as in a plan, with
    plan.links and plan.prices; if these do not match the run, or if layers could not be counted,
    only the pipeline is simulated.
    """
    pipe, foreseen = session.pipe, session.foreseen
    costs = None
    if pipe.partition.is_measured:
        costs = pipe.partition.stage_costs(pipe.layout.recomputed)
    if costs is None:
        return None
    if foreseen is not None:
        try:
            machine = machine_of(
                session.config,
                pipe.world.device,
                slow_once(cluster_of(session.config, pipe.world.size), pipe.partition.rank_paces),
                Rates.alike(1.0),
                session.config.plan.host_copy_bytes_per_s,
            )
        except ConfigError as error:
            log.warning("the step is predicted without links and prices: %s", error)
        else:
            known = replace(foreseen.known, times=pipe.partition.times, measure=MEASURED)
            combining = pipe.request.combining
            return step_of(pipe.layout, known, machine, combining, session.batch_size)
    costs = replace(costs, shares=shares_of(pipe, session.batch_size))
    timeline = simulate(pipe.layout.schedule, costs)
    return StepTime(timeline, timeline.end_of_compute)


def _traced(traced: MedianTrace) -> dict[str, Any]:
    bubbles = [timeline.bubble for timeline in traced.replicas]
    return {
        "step": traced.step,
        "pipeline_s": traced.pipeline_s,
        "file": traced.file,
        "bubble_of_replicas": bubbles,
    }


def _ranks(
    session: Session, ranks: Sequence[RankFigures], traced: MedianTrace | None
) -> list[dict[str, Any]]:
    if traced is None:
        times: list[dict[str, Any]] = [{"busy_s": None, "idle_s": None, "idle_causes": None}]
        times *= len(ranks)
    else:
        times = idle_of_ranks(ranks, traced.pipeline_s, traced.replicas)
    planned = None if session.foreseen is None else session.foreseen.ranks
    return [
        figures.as_dict()
        | own
        | {"planned_memory": None if planned is None else _planned(planned[figures.stage_rank])}
        for figures, own in zip(ranks, times, strict=True)
    ]


def _planned(rank: RankForecast) -> dict[str, int]:
    parts = ("weight", "cast", "gradient", "optimizer", "workspace", "activation", "total")
    return {f"{part}_bytes": getattr(rank, f"{part}_bytes") for part in parts}


def _advice(session: Session, traced: MedianTrace, ended: RunOutcome) -> list[dict[str, Any]]:
    """Return advice on how the traced step could become faster, for the replica with the most work.

    For a stopped run only quick simulations are made, since the process may soon be killed.
    """
    config, foreseen = session.config, session.foreseen
    if foreseen is None:
        return []
    pipeline, finer = config.pipeline, 2 * config.pipeline.microbatches
    pieces = pipeline.num_replicas * config.train.accumulation * finer
    has_samples = config.train.batch_size >= pieces
    most = _MOST_ACTIONS_IN_HASTE if ended.outcome == "stopped" else MOST_ACTIONS
    measured = traced.replicas[session.pipe.layout.portions.fullest]
    found = foreseen.advice(session.pipe, measured, finer if has_samples else None, most)
    return [each._asdict() | {"text": each.text()} for each in found]


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot represent, by None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
