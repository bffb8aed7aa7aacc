"""Explain idle time: split the bubble of a simulated or measured step by cause."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.actions import COMPUTE, Action
from gpipe_hpc.schedule.table.schedule import Schedule
from gpipe_hpc.schedule.timeline import Event, Timeline
from gpipe_hpc.schedule.waits import DataFlow


class BubbleCauses(NamedTuple):
    """Idle time by cause, in time units for one rank or as shares of the step.

    Attributes:
        fill_and_drain: time in which ranks wait for each other at the start and end of the step.
        imbalance: idle time that remains even if the busiest rank never waits.
        transfers: idle time that disappears if values arrive as soon as they are computed and ranks
            continue at once; in a measured step, everything that no action explains.
        reduction_tail: time from the end of all compute to the end of the last reduction.
    """

    fill_and_drain: float
    imbalance: float
    transfers: float
    reduction_tail: float


def explain_bubble(schedule: Schedule, costs: Costs) -> BubbleCauses:
    """Split the bubble of a simulated table into shares of the total time of all ranks.

    The shares sum to the bubble. None is negative, because removing a wait never makes a table of
    fixed order slower.
    """
    timeline = simulate(schedule, costs)
    total = timeline.num_ranks * timeline.makespan
    if total <= 0:
        return BubbleCauses(0.0, 0.0, 0.0, 0.0)
    undelayed = _end_of_compute(simulate(schedule, costs.without_transfers()))
    parts = zip(*_split_by_cause(timeline, undelayed), strict=True)
    return BubbleCauses(*(sum(part) / total for part in parts))


def explain_measured(timeline: Timeline) -> tuple[BubbleCauses, ...]:
    """Split the idle time of each rank in a measured step by cause.

    The parts of a rank sum to the makespan minus its busy time. The part due to transfers is found
    by replaying the measured order and durations without transfers.
    """
    return _split_by_cause(timeline, _end_without_transfers(timeline))


def _split_by_cause(timeline: Timeline, undelayed: float) -> tuple[BubbleCauses, ...]:
    """Split the idle time of each rank; `undelayed` is the end of all compute without transfers."""
    busy = timeline.busy
    end = _end_of_compute(timeline)
    return tuple(
        BubbleCauses(
            fill_and_drain=undelayed - max(busy),
            imbalance=max(busy) - own,
            transfers=end - undelayed,
            reduction_tail=timeline.makespan - end,
        )
        for own in busy
    )


def _end_of_compute(timeline: Timeline) -> float:
    """Return the time from the start of the step to the end of its last compute action."""
    return timeline.end_of_compute - timeline.start_s


def _end_without_transfers(timeline: Timeline) -> float:
    """Return the end of all compute if transfers were free."""
    return replayed_end(timeline)


def replayed_end(
    timeline: Timeline,
    begins: Sequence[float] = (),
    gap: Callable[[Event], float] = lambda event: 0.0,
) -> float:
    """Return the end of all compute if the measured actions are replayed with free transfers.

    Actions keep their measured order and duration. Rank r starts at ``begins[r]`` (default 0); an
    action starts ``gap(event)`` after its rank is free and its inputs are available.
    """
    rows = [[e for e in row if e.action.op in COMPUTE] for row in timeline.events]
    flow = DataFlow(replace(timeline, events=tuple(map(tuple, rows))))
    ends: dict[Action, float] = {}
    done, free_at = [0] * len(rows), list(begins) or [0.0] * len(rows)
    waiting = set(range(len(rows)))
    while waiting:
        before = sum(done)
        for rank in sorted(waiting):
            row = rows[rank]
            while done[rank] < len(row):
                event = row[done[rank]]
                needs = [wait.maker.action for wait in flow.waits(event)]
                if any(need not in ends for need in needs):
                    break
                start = max([free_at[rank], *(ends[need] for need in needs)]) + gap(event)
                ends[event.action] = free_at[rank] = start + event.duration_s
                done[rank] += 1
            else:
                waiting.discard(rank)
        assert not waiting or sum(done) > before, f"{timeline.name}: measured order deadlocks"
    return max(ends.values(), default=0.0)
