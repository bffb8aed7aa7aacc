"""Local search: swap actions on the critical path of a table while that makes it faster."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.costs import Costs
from gpipe_hpc.schedule.passes.lowering import lower
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.actions import COMPUTE, COPIES, Action
from gpipe_hpc.schedule.table.dependencies import OPTIONAL, users_of
from gpipe_hpc.schedule.table.lifetimes import bounds_of
from gpipe_hpc.schedule.table.schedule import Schedule
from gpipe_hpc.schedule.timeline import Event, Timeline
from gpipe_hpc.schedule.waits import DataFlow

Fits = Callable[[Schedule], bool]


def improve(schedule: Schedule, costs: Costs, fits: Fits, max_trials: int) -> Schedule:
    """Return a table at least as fast, after at most `max_trials` simulated swaps.

    Two consecutive actions of a rank on the critical path change places; a swap is undone if it is
    slower, does not fit or deadlocks. A declared bound of activations is updated. `schedule` is
    compute-only; it may include recomputation, offloading and skips.
    """
    timeline = _run(schedule, costs)
    trials = 0
    improved = True
    while improved:
        improved = False
        for swap in critical_swaps(timeline):
            trials += 1
            if trials > max_trials:
                return schedule
            swapped = _swapped(schedule, swap)
            if not fits(swapped):
                continue
            try:
                candidate = _run(swapped, costs)
            except ScheduleError:
                continue  # it would deadlock
            if candidate.end_of_compute < timeline.end_of_compute:
                schedule, timeline, improved = swapped, candidate, True
                break
    return schedule


def _run(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a table; it is lowered first if one action may wait for several transfers."""
    one_each = not (schedule.skips or schedule.overlaps)
    return simulate(schedule if one_each else lower(schedule), costs)


class Swap(NamedTuple):
    """An exchange of two adjacent ranges of a rank's list: first to middle, and middle to end."""

    rank: int
    first: int
    middle: int
    end: int


def critical_swaps(timeline: Timeline) -> Iterator[Swap]:
    """Yield swaps of neighbouring actions on one critical path, the last first.

    The path is followed back in time from the last compute action: to the previous action of the
    rank or, if the rank was waiting, to the action that it waited for. An ``R`` or ``FETCH`` moves
    together with the backward that it serves, or alone to before it.
    """
    path = _Path(timeline)
    event = path.last
    while event is not None:
        before = path.before(event)
        if before is None:
            event = path.waited_for(event)
            continue
        yield from path.swaps(before, event)
        event = before


class _Path:
    """Positions of the events of a timeline, and the events that determine the start of others."""

    def __init__(self, timeline: Timeline) -> None:
        self._flow = DataFlow(timeline)
        bare = COMPUTE | COPIES
        self._rows = [[e for e in row if e.action.op in bare] for row in timeline.events]
        self._positions = {
            event.action: position for row in self._rows for position, event in enumerate(row)
        }
        computed = (e for row in self._rows for e in row if e.action.op in COMPUTE)
        self.last = max(computed, key=lambda event: event.end_s, default=None)

    def before(self, event: Event) -> Event | None:
        """Return the previous event of the same rank, if it ended when `event` started, else None.

        A rank runs one compute action and one copy at a time; a copy starts when the rank reaches
        it and the previous copy is done.
        """
        copies = event.action.op in COPIES
        row = self._rows[event.rank]
        for other in reversed(row[: self._positions[event.action]]):
            computes = other.action.op in COMPUTE
            if (computes or copies) and other.end_s == event.start_s:
                return other
            if computes and not copies:
                return None
        return None

    def waited_for(self, event: Event) -> Event | None:
        """Return the event that made or fetched the value that `event` waited for, or None."""
        waits = list(self._flow.waits(event))
        in_time = [wait for wait in waits if wait.over_s == event.start_s]
        # A compute-only table records no transfers: it waited for the value of another rank.
        found = in_time or [wait for wait in waits if wait.maker.rank != event.rank]
        if not found:
            return None
        last = max(found, key=lambda wait: wait.over_s)
        if last.send is not None and last.send.action.op in COPIES:
            return last.send
        return last.maker

    def swaps(self, before: Event, event: Event) -> Iterator[Swap]:
        """Yield the swaps of two neighbours, alone and with the ``R`` or ``FETCH`` they need.

        Actions of the same stage and micro-batch are not swapped. Copies between the two that serve
        neither stay after the first.
        """
        if before.action[1:] == event.action[1:]:
            return
        row = [each.action for each in self._rows[event.rank]]
        first, middle = self._positions[before.action], self._positions[event.action]
        end = middle + 1
        if event.action.op in COMPUTE:
            while _serves(row[middle - 1], row[middle]):
                middle -= 1
            while end < len(row) and _serves(row[end - 1], row[end]):
                end += 1
        while first and _serves(row[first - 1], row[first]):
            first -= 1
        alone = self._positions[event.action] + 1
        for start in dict.fromkeys((self._positions[before.action], first)):
            for stop in dict.fromkeys((alone, end)):
                yield Swap(event.rank, start, middle, stop)


def _serves(one: Action, other: Action) -> bool:
    """Return whether `one` is the ``R`` or ``FETCH`` that the following action `other` needs."""
    return one.op in OPTIONAL and one[1:] == other[1:] and other.op in users_of(one.op)


def _swapped(schedule: Schedule, swap: Swap) -> Schedule:
    rank, first, middle, end = swap
    row = schedule.ranks[rank]
    row = (*row[:first], *row[middle:end], *row[first:middle], *row[end:])
    rows = (*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :])
    bounds = schedule.max_activations
    if bounds is not None:
        bounds = (*bounds[:rank], *bounds_of([row]), *bounds[rank + 1 :])
    return replace(schedule, ranks=rows, max_activations=bounds)
