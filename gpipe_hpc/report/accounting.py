"""Divide the time of a mean step into parts (compute, transfers, ...) that add up to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpipe_hpc.report.record import Record
from gpipe_hpc.schedule import Event, Timeline, replayed_end
from gpipe_hpc.schedule.table.actions import COMPUTE
from gpipe_hpc.schedule.waits import DataFlow
from gpipe_hpc.trainer.traces.files import ReadStep

PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "compute": "forwards, backwards, recomputation: mean over ranks",
        "fill and drain": "dependencies of the schedule: ranks wait for other ranks",
        "imbalance": "waiting for the rank with most work",
        "transfers": "waiting for a tensor that another rank has already computed",
        "other replicas": "another replica started earlier or finished later",
        "reduction": "gradient all-reduces that continue after the pipeline",
        "synchronization": "after the pipeline: exchange of step results, and gradient scaling",
        "reading data": "waiting for samples",
        "checkpoint": "waiting until the state is saved",
        "optimizer": "gradient clipping and optimizer step, on rank 0",
        "host": "Python between actions and around the step, waiting for a CPU",
    }
)
IDLE: Final = ("fill and drain", "imbalance", "transfers", "other replicas")
"""The parts that are idle time within the pipeline, besides reading and host time."""


END_STALL: Final = "checkpoint_end_stall_s"
"""Metric of the delay at the end of a checkpoint written in the background."""
_STALLS: Final = ("checkpoint_stall_s", END_STALL, "neighbour_stall_s")


class RankTime(NamedTuple):
    """Seconds of one rank in the pipeline of the traced step, by part, including idle time."""

    rank: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Account:
    """Time of the mean step by part, with checkpoint time divided over all steps.

    Without a trace the pipeline is not divided: it counts as "compute", and `ranks` is empty.

    Attributes:
      parts: seconds by name in PARTS, which add up to `step_s`.
      ranks: parts of each rank in the traced step.
      pipeline_s: mean time in the pipeline over all counted steps.
      traced_s: time in the pipeline of the traced step.
    """

    step_s: float
    pipeline_s: float
    parts: Mapping[str, float]
    ranks: tuple[RankTime, ...]
    traced_s: float
    num_steps: int

    @property
    def scale(self) -> float:
        """Return the ratio of the mean pipeline time to that of the traced step."""
        return self.pipeline_s / self.traced_s if self.traced_s else 1.0


def account_of(record: Record) -> Account | None:
    """Divide the time of a run's mean step into parts; return None if no step was timed."""
    rows = record.counted_steps
    if not rows:
        return None

    def mean(name: str) -> float:
        return fmean(row.get(name) or 0.0 for row in rows)

    stall_s = sum(sum(record.stall_s(name)) for name in _STALLS)
    pipeline_s, checkpoint_s = mean("pipeline_s"), stall_s / len(rows)
    step_s = mean("step_time_s") + checkpoint_s
    ranks = () if record.traced is None else shares(record.traced)
    traced_s = sum(ranks[0].seconds.values()) if ranks else 0.0
    parts = dict.fromkeys(PARTS, 0.0)
    if traced_s:
        for name in parts:
            each = fmean(share.seconds.get(name, 0.0) for share in ranks)
            parts[name] = each / traced_s * pipeline_s
    else:
        parts["compute"] = pipeline_s
    edge_s = mean("edge_s")
    tail_s = 0.0 if record.traced is None else _reduction_tail_s(record.traced.replicas)
    parts["reduction"] += min(edge_s, tail_s)
    parts["synchronization"] += edge_s - min(edge_s, tail_s)
    # Time in which rank 0 read after others had begun is part of the pipeline.
    parts["reading data"] += fmean(
        row.get("reading_ahead_s", row.get("reading_s")) or 0.0 for row in rows
    )
    parts["checkpoint"] += checkpoint_s
    parts["optimizer"] += mean("optimizer_s") + mean("clipping_s")
    parts["host"] += step_s - sum(parts.values())
    return Account(step_s, pipeline_s, parts, ranks, traced_s, len(rows))


def shares(traced: ReadStep) -> tuple[RankTime, ...]:
    """Divide the pipeline time of a step for each world rank; all ranks have the same sum.

    The measured order is simulated repeatedly, each time with one more cause of delay: first the
    busiest rank alone, then dependencies between ranks, late starts, reading, and late continuation
    of ranks that had all inputs. The remaining measured time is attributed to transfers.
    """
    running = [each for each in traced.replicas if _computes(each)]
    if not running:
        return ()
    begin_s = min(_first_s(each) for each in running)
    end_s = max(each.end_of_compute for each in running)
    found: list[RankTime] = []
    for number, timeline in enumerate(traced.replicas):
        size = timeline.num_ranks
        first = number * size
        around = traced.around[first : first + size]
        common = _common(timeline, begin_s, end_s, around) if _computes(timeline) else {}
        idle_s = end_s - begin_s - sum(common.values())
        busiest = max(timeline.busy)
        for rank, busy in enumerate(timeline.busy):
            seconds = {"compute": busy, "imbalance": busiest - busy, **common}
            if not common:
                seconds["other replicas"] = idle_s
            found.append(RankTime(first + rank, seconds))
    return tuple(found)


def _common(
    timeline: Timeline, begin_s: float, end_s: float, around: Sequence[Sequence[Any]]
) -> dict[str, float]:
    """Return the idle seconds, by part, that all ranks of a replica have in common.

    The busiest rank has no other idle time.
    """
    began, read = _begins(timeline, begin_s, around)
    hosts = _host_gaps(timeline, read, begin_s)
    ends = [
        max(timeline.busy),
        replayed_end(timeline),
        replayed_end(timeline, began),
        replayed_end(timeline, read),
        replayed_end(timeline, read, lambda event: hosts.get(event, 0.0)),
        timeline.end_of_compute - begin_s,
        end_s - begin_s,
    ]
    fill, late, reading, host, transfers, others = (
        after - before for before, after in pairwise(ends)
    )
    return {
        "fill and drain": fill,
        "host": late + host,
        "reading data": reading,
        "transfers": transfers,
        "other replicas": others,
    }


def _begins(
    timeline: Timeline, begin_s: float, around: Sequence[Sequence[Any]]
) -> tuple[list[float], list[float]]:
    """Return when each rank began and finished reading samples, in seconds; 0 if unknown."""
    began, read = [0.0] * timeline.num_ranks, [0.0] * timeline.num_ranks
    for rank, row in enumerate(around):
        first = next((e.start_s for e in timeline.events[rank] if e.action.op in COMPUTE), None)
        for each in row:
            if each.name == "reading" and first is not None:
                # Not later than the first action: the two kinds of timestamps differ slightly.
                began[rank] = max(0.0, min(first, each.start_s) - begin_s)
                read[rank] = max(0.0, min(first, each.end_s) - begin_s)
    return began, read


def _host_gaps(
    timeline: Timeline, begins: Sequence[float], begin_s: float
) -> Mapping[Event, float]:
    """Return by how many seconds the host delayed each action that needed no other rank."""
    flow = DataFlow(timeline)
    gaps: dict[Event, float] = {}
    for rank, row in enumerate(timeline.events):
        free_s = begin_s + begins[rank]
        for event in row:
            if event.action.op not in COMPUTE:
                continue
            makers = [wait.maker for wait in flow.waits(event)]
            if all(maker.rank == rank for maker in makers):
                gaps[event] = max(0.0, event.start_s - free_s)
            free_s = event.end_s
    return gaps


def _computes(timeline: Timeline) -> bool:
    return any(event.action.op in COMPUTE for row in timeline.events for event in row)


def _first_s(timeline: Timeline) -> float:
    return min(e.start_s for row in timeline.events for e in row if e.action.op in COMPUTE)


def _reduction_tail_s(replicas: Sequence[Timeline]) -> float:
    """Return for how many seconds reductions continued after the compute of all replicas."""
    computed_s = max((each.end_of_compute for each in replicas), default=0.0)
    ended_s = max((each.start_s + each.makespan for each in replicas), default=0.0)
    return max(0.0, ended_s - computed_s)
