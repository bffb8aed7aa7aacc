"""Local search: swap actions on the critical path of a table while that makes it faster."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.schedule import Schedule
from gpipe_hpc.schedule.timeline import Timeline

Fits = Callable[[Schedule], bool]


def improve(schedule: Schedule, costs: Costs, fits: Fits, max_trials: int) -> Schedule:
    """Return a table at least as fast, after at most `max_trials` simulated swaps.

    Two actions that follow one another on a rank without a pause, on the path that sets the
    makespan, change places; what is slower, does not fit or cannot run is put back.
    """
    timeline = simulate(schedule, costs)
    trials = 0
    improved = True
    while improved:
        improved = False
        for rank, position in critical_pairs(timeline):
            trials += 1
            if trials > max_trials:
                return schedule
            swapped = _swap(schedule, rank, position)
            if not fits(swapped):
                continue
            try:
                candidate = simulate(swapped, costs)
            except ScheduleError:
                continue  # it would deadlock
            if candidate.makespan < timeline.makespan:
                schedule, timeline, improved = swapped, candidate, True
                break
    return schedule


def critical_pairs(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """Yield (rank, position) of pairs in a row on one critical path, the later ones first.

    The path is followed back in time from the last action: to the one that the rank ran right
    before, or, where the rank had to wait, to the action of another rank that it waited for.
    """
    ends = {event.action: event for row in timeline.events for event in row}
    places = {
        event.action: (rank, position)
        for rank, row in enumerate(timeline.events)
        for position, event in enumerate(row)
    }
    last = max(ends.values(), key=lambda event: event.end_s, default=None)
    while last is not None:
        rank, position = places[last.action]
        before = timeline.events[rank][position - 1] if position else None
        if before is not None and before.end_s == last.start_s:
            if before.action[1:] != last.action[1:]:
                yield rank, position - 1
            last = before
            continue
        last = next((ends[maker] for maker in _makers(last.action) if maker in ends), None)


def _makers(action: Action) -> list[Action]:
    """Return which actions of the neighbouring stage make what an action needs of it."""
    op, stage, microbatch, _ = action
    if op is Op.F:
        return [Action(op, stage - 1, microbatch)]
    if op in (Op.B, Op.I):
        return [Action(kind, stage + 1, microbatch) for kind in (Op.B, Op.I)]
    return []


def _swap(schedule: Schedule, rank: int, position: int) -> Schedule:
    row = list(schedule.ranks[rank])
    row[position], row[position + 1] = row[position + 1], row[position]
    rows = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=rows)
