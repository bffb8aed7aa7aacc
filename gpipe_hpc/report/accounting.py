"""Where the time of a mean step went: parts that add up to it."""

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
        "fill and drain": "ranks wait for one another, as the schedule has it",
        "imbalance": "a busier rank sets the pace",
        "transfers": "a rank waits for what another one has made",
        "other replicas": "another pipeline began earlier or ended later",
        "reduction": "sums of gradients over replicas that are still under way behind the pipeline",
        "meeting": "behind the pipeline: what ranks tell one another, and dividing the gradients",
        "reading data": "waiting for samples",
        "checkpoint": "all wait for the state to be kept",
        "optimizer": "clipping, and the optimizer's step, on rank 0",
        "host": "Python between actions and around the step, waiting for a processor",
    }
)
IDLE: Final = ("fill and drain", "imbalance", "transfers", "other replicas")
"""The parts that are idle time within the pipeline, beside what is read or waits there."""


END_STALL: Final = "checkpoint_end_stall_s"
"""Of a checkpoint that was written in the background: what its end holds up."""
_STALLS: Final = ("checkpoint_stall_s", END_STALL, "neighbour_stall_s")


class Share(NamedTuple):
    """What a rank did in the pipeline of the traced step, in seconds, by part; they sum to it."""

    rank: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Account:
    """The mean of counted steps, checkpoints shared out among them.

    `parts`: seconds by name in PARTS, in sum `step_s`. `ranks`: the traced step; `pipeline_s` is
    the mean time in the pipeline of all counted steps, `traced_s` that of the traced one. Without
    a trace the pipeline is not divided: it is all "compute", and `ranks` is empty.
    """

    step_s: float
    pipeline_s: float
    parts: Mapping[str, float]
    ranks: tuple[Share, ...]
    traced_s: float
    num_steps: int

    @property
    def scale(self) -> float:
        """Return what a second of the traced pipeline is in the mean one."""
        return self.pipeline_s / self.traced_s if self.traced_s else 1.0


def account_of(record: Record) -> Account | None:
    """Return where the time went; None where no step has been timed."""
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
    parts["meeting"] += edge_s - min(edge_s, tail_s)
    # What rank 0 read while others had begun is in the pipeline.
    parts["reading data"] += fmean(
        row.get("reading_ahead_s", row.get("reading_s")) or 0.0 for row in rows
    )
    parts["checkpoint"] += checkpoint_s
    parts["optimizer"] += mean("optimizer_s") + mean("clipping_s")
    parts["host"] += step_s - sum(parts.values())
    return Account(step_s, pipeline_s, parts, ranks, traced_s, len(rows))


def shares(traced: ReadStep) -> tuple[Share, ...]:
    """Divide the pipeline of a step for each world rank; all have the same sum.

    Found by running the measured order again on paper, each time with one cause more: the busiest
    rank alone, then what ranks need of one another, that some began late or still read, that a
    rank went on late with all it needed at hand. What is then left of the measured time is
    transfers.
    """
    running = [each for each in traced.replicas if _computes(each)]
    if not running:
        return ()
    begin_s = min(_first_s(each) for each in running)
    end_s = max(each.end_of_compute for each in running)
    found: list[Share] = []
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
            found.append(Share(first + rank, seconds))
    return tuple(found)


def _common(
    timeline: Timeline, begin_s: float, end_s: float, around: Sequence[Sequence[Any]]
) -> dict[str, float]:
    """Return the parts that all ranks of a replica have alike; with the busiest they sum up."""
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
    """Return when each rank came to its samples, and when it had read them; 0 where not known."""
    began, read = [0.0] * timeline.num_ranks, [0.0] * timeline.num_ranks
    for rank, row in enumerate(around):
        first = next((e.start_s for e in timeline.events[rank] if e.action.op in COMPUTE), None)
        for each in row:
            if each.name == "reading" and first is not None:
                # Never later than it went on: marks of two kinds may differ by a little.
                began[rank] = max(0.0, min(first, each.start_s) - begin_s)
                read[rank] = max(0.0, min(first, each.end_s) - begin_s)
    return began, read


def _host_gaps(
    timeline: Timeline, begins: Sequence[float], begin_s: float
) -> Mapping[Event, float]:
    """Return how much later an action started than it could, where it needed nothing from afar."""
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
    """Return how long reductions went on behind all compute, of all replicas."""
    computed_s = max((each.end_of_compute for each in replicas), default=0.0)
    ended_s = max((each.start_s + each.makespan for each in replicas), default=0.0)
    return max(0.0, ended_s - computed_s)
