"""Why ranks idle: the bubble of a table, or of a measured step, split by cause."""

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
    """Parts of idle time by cause, of one rank in time units, or as shares.

    Transfers: idle time that disappears if values arrive as soon as they are computed and a rank
    continues at once; in a measured step, all that no action explains. Imbalance: what then remains
    even if the busiest rank never waits. Fill and drain: the rest of the time in which ranks wait
    for each other. Reduction tail: from the end of all compute to the end of the last reduction.
    """

    fill_and_drain: float
    imbalance: float
    transfers: float
    reduction_tail: float


def explain_bubble(schedule: Schedule, costs: Costs) -> BubbleCauses:
    """Split the bubble of a simulated table into shares of the time of all ranks.

    The shares sum to the bubble. None is negative, because removing a wait never makes a table of
    fixed order slower.
    """
    timeline = simulate(schedule, costs)
    total = timeline.num_ranks * timeline.makespan
    if total <= 0:
        return BubbleCauses(0.0, 0.0, 0.0, 0.0)
    undelayed = _end_of_compute(simulate(schedule, costs.without_transfers()))
    parts = zip(*_explained(timeline, undelayed), strict=True)
    return BubbleCauses(*(sum(part) / total for part in parts))


def explain_measured(timeline: Timeline) -> tuple[BubbleCauses, ...]:
    """Split the idle time of each rank in a measured step; the parts sum to makespan minus busy.

    Transfers are found by simulating the measured order and durations with free transfers.
    """
    return _explained(timeline, _undelayed_end(timeline))


def _explained(timeline: Timeline, undelayed: float) -> tuple[BubbleCauses, ...]:
    """Split by rank; `undelayed` is the time all compute would take without transfers."""
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
    """Return the time from the start to the end of the last compute action."""
    return timeline.end_of_compute - timeline.start_s


def _undelayed_end(timeline: Timeline) -> float:
    """Return the end of all compute where each action starts once its rank and its needs allow."""
    return replayed_end(timeline)


def replayed_end(
    timeline: Timeline,
    begins: Sequence[float] = (),
    gap: Callable[[Event], float] = lambda event: 0.0,
) -> float:
    """Return when compute ends if a measured order is simulated with its measured durations.

    A rank begins at its time in `begins` (default: 0); an action starts `gap` after its rank and
    its inputs allow. Transfers are free.
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
        assert not waiting or sum(done) > before, f"{timeline.name}: what ran could not have run"
    return max(ends.values(), default=0.0)
