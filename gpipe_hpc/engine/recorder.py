"""Start and end times of the actions of a step."""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

from gpipe_hpc.comm.collectives.group import CollectiveHandle
from gpipe_hpc.device.deferred import Mark, seconds_between, wait_for_mark
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.device import Event as DeviceEvent
from gpipe_hpc.schedule import Action, Event
from gpipe_hpc.schedule.table.actions import COMPUTE

Now = Callable[[], float]


class StepStart:
    """The event at the start of a step, and the host time at which the device reached it.

    Args:
        mark: The event on the device's stream.
        put_s: Host time at which the event was recorded.
        before: The start of the previous step, from which the time is computed; None if the device
            was idle and reached the event at once.
        now: The host's clock.
    """

    def __init__(
        self, mark: DeviceEvent, put_s: float, before: "StepStart | None", now: Now
    ) -> None:
        self.mark = mark
        self._put_s, self._seen_s, self._before, self._now = put_s, float("inf"), before, now

    def look(self) -> bool:
        """Return whether the device has reached the event; store when this was first seen."""
        if self._seen_s == float("inf") and self.mark.query():
            self._seen_s = self._now()
        return self._seen_s < float("inf")

    def seconds(self) -> float:
        """Return the host time in seconds; the device must have reached the event."""
        if self._before is not None:
            earlier = self._before
            self.look()
            reached_s = earlier.seconds() + earlier.mark.elapsed_ms(self.mark) / 1e3
            self._put_s = min(max(reached_s, self._put_s), self._seen_s)
            self._before = None
        return self._put_s


class DeviceClock:
    """Records events on the current stream and converts the start of each step to host time.

    The constructor waits for the device once.
    """

    def __init__(self, device: Device, now: Now = time.perf_counter) -> None:
        self._device, self._now = device, now
        device.synchronize()
        put_s = now()
        # Starts of steps that may still be read, the newest last.
        self._steps = deque([StepStart(self._marked(), put_s, None, now)])
        self._is_new = False

    def mark(self) -> DeviceEvent:
        """Record an event on the current stream and return it."""
        if self._is_new:
            self._is_new = False
            self._steps[-1].look()
        return self._marked()

    def begin(self) -> StepStart:
        """Begin a step."""
        while len(self._steps) > 1 and self._steps[1].look():
            self._steps.popleft()
            self._steps[0].seconds()  # which releases the start of the step before it
        put_s = self._now()
        self._steps.append(StepStart(self._marked(), put_s, self._steps[-1], self._now))
        self._is_new = True
        return self._steps[-1]

    def _marked(self) -> DeviceEvent:
        mark = self._device.event(timing=True)
        mark.record()
        return mark


class ActionSpan(NamedTuple):
    """An action, and the marks at its start and its end."""

    action: Action
    start: Mark
    end: Mark


class StepTimes(NamedTuple):
    """Total compute time of a rank in a step, and its first start and last end.

    Seconds of the host's monotonic clock. If a rank computed nothing, `start_s` is infinite and
    `end_s` minus infinity.
    """

    busy_s: float
    start_s: float = math.inf
    end_s: float = -math.inf


class ActionTimes(NamedTuple):
    """The actions of a step, with start and end of each in turn in `seconds`.

    Contains compute, and the actions that overlap with it: reductions and gathers of parameters.
    """

    actions: tuple[Action, ...]
    seconds: "array[float]"  # a class that takes no parameter before Python 3.12

    @property
    def busy_s(self) -> float:
        """Return the total time of compute actions in seconds."""
        return sum(end - start for start, end in self._computed())

    @property
    def times(self) -> StepTimes:
        """Return total, first start and last end of compute actions."""
        computed = self._computed()
        if not computed:
            return StepTimes(0.0)
        return StepTimes(self.busy_s, computed[0][0], max(end for _, end in computed))

    def _computed(self) -> list[tuple[float, float]]:
        spans = zip(self.actions, self.seconds[0::2], self.seconds[1::2], strict=True)
        return [(start, end) for action, start, end in spans if action.op in COMPUTE]

    def events(self, rank: int) -> tuple[Event, ...]:
        """Return the actions as events of a rank."""
        starts, ends = self.seconds[0::2], self.seconds[1::2]
        return tuple(map(Event, repeat(rank), self.actions, starts, ends))


def on_one_clock(
    ranks: Sequence[tuple[int, float, tuple[Event, ...]]],
) -> tuple[tuple[Event, ...], ...]:
    """Return the events of all ranks on the clock of the first rank.

    `ranks`: for each rank the identity of its clock, the time on that clock at a moment common to
    all ranks, and its events.
    """
    first_clock, first_s, _ = ranks[0]
    found = []
    for clock, common_s, events in ranks:
        by_s = 0.0 if clock == first_clock else first_s - common_s
        moved = (e._replace(start_s=e.start_s + by_s, end_s=e.end_s + by_s) for e in events)
        found.append(tuple(moved))
    return tuple(found)


class StepMarks:
    """Start and end of each action of one step, as marks that are converted to times on demand.

    A mark is a host time in seconds, or an event on an accelerator.

    Args:
        mark: Returns a mark of the present moment.
        begin: The start of the step on an accelerator; else None.
    """

    def __init__(self, mark: Callable[[], Mark], begin: StepStart | None = None) -> None:
        self._begin, self._mark = begin, mark
        self.spans: list[ActionSpan] = []  # of compute
        # Actions that overlap with compute, each with a list that gets its end, by any thread.
        self._overlapped: list[tuple[Action, Mark, list[Mark]]] = []
        self._read: ActionTimes | None = None

    def add(self, action: Action, start: Mark) -> None:
        """Record that an action ran from `start` until now."""
        self.spans.append(ActionSpan(action, start, self._mark()))

    def add_overlapped(self, action: Action, start: Mark, pending: CollectiveHandle) -> None:
        """Record an action that overlaps with compute, from `start` until `pending` is done."""
        mark = self._mark  # not self, which `pending` would keep alive
        ends: list[Mark] = []
        self._overlapped.append((action, start, ends))
        pending.when_done(lambda: ends.append(mark()))

    @property
    def moments(self) -> ActionTimes:
        """Return the times of the step's actions on the host's monotonic clock; read once.

        The end of an overlapping action that has not ended is now.
        """
        num_marked = len(self.spans) + len(self._overlapped)
        if self._read is None or len(self._read.actions) != num_marked:
            overlapped = [
                ActionSpan(action, start, ends[0] if ends else self._mark())
                for action, start, ends in self._overlapped
            ]
            self._read = self._moments([*self.spans, *overlapped])
        return self._read

    @property
    def times(self) -> StepTimes:
        """Return the compute times of this rank; overlapping actions may still be running."""
        return self._moments(self.spans).times

    def _moments(self, spans: Sequence[ActionSpan]) -> ActionTimes:
        marks = (mark for span in spans for mark in (span.start, span.end))
        return ActionTimes(
            tuple(span.action for span in spans), array("d", map(self._seconds, marks))
        )

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._begin is not None, "given with marks that are events"
        wait_for_mark(mark)
        return self._begin.seconds() + seconds_between(self._begin.mark, mark)


class Recorder:
    """Records start and end of the actions of a step."""

    def __init__(self, device: Device) -> None:
        self._clock = DeviceClock(device) if device.is_accelerator else None
        self.mark: Callable[[], Mark] = self._clock.mark if self._clock else time.perf_counter
        self.step = StepMarks(self.mark)

    def start_step(self) -> None:
        """Begin a new step; marks of earlier steps stay readable."""
        self.step = StepMarks(self.mark, self._clock.begin() if self._clock else None)
