"""Times at which the actions of a step began and ended."""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
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
    """The first mark of a step, and the host time at which the device reached it.

    Args:
        mark: The event on the device's stream.
        put_s: Host time at which the event was recorded.
        before: The start of the step before, from which the time is computed; None if the device
            was idle and reached the event at once.
        now: The host's clock.
    """

    def __init__(
        self, mark: DeviceEvent, put_s: float, before: "StepStart | None", now: Now
    ) -> None:
        self.mark = mark
        self._put_s, self._seen_s, self._before, self._now = put_s, float("inf"), before, now

    def look(self) -> bool:
        """Return whether the device has reached the mark, and note the time when it first has."""
        if self._seen_s == float("inf") and self.mark.query():
            self._seen_s = self._now()
        return self._seen_s < float("inf")

    def seconds(self) -> float:
        """Return the host time in seconds; the device must have reached the mark."""
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
        # Starts that may still be read, the newest last.
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
            self._steps[0].seconds()  # lets go of the step before it
        put_s = self._now()
        self._steps.append(StepStart(self._marked(), put_s, self._steps[-1], self._now))
        self._is_new = True
        return self._steps[-1]

    def _marked(self) -> DeviceEvent:
        mark = self._device.event(timing=True)
        mark.record()
        return mark


class ActionSpan(NamedTuple):
    """An action between two marks."""

    action: Action
    start: Mark
    end: Mark


class StepTimes(NamedTuple):
    """When a rank computed in a step: for how long in all, and between which moments.

    Seconds of the host's monotonic clock. A rank that computed nothing has no moments: its start
    is later, and its end earlier, than any other.
    """

    busy_s: float
    start_s: float = math.inf
    end_s: float = -math.inf


class ActionTimes(NamedTuple):
    """The actions of a step, and start and end of each in turn; 16 bytes an action.

    Compute, and actions that overlap with it: reductions and gathered parameters.
    """

    actions: tuple[Action, ...]
    seconds: "array[float]"  # a class that takes no parameter before Python 3.12

    @property
    def busy_s(self) -> float:
        """Return how long all compute took together."""
        return sum(end - start for start, end in self._computed())

    @property
    def times(self) -> StepTimes:
        """Return when there was compute."""
        computed = self._computed()
        if not computed:
            return StepTimes(0.0)
        return StepTimes(self.busy_s, computed[0][0], max(end for _, end in computed))

    def _computed(self) -> list[tuple[float, float]]:
        spans = zip(self.actions, self.seconds[0::2], self.seconds[1::2], strict=True)
        return [(start, end) for action, start, end in spans if action.op in COMPUTE]

    def events(self, rank: int) -> tuple[Event, ...]:
        """Return them as events of a rank."""
        starts, ends = self.seconds[0::2], self.seconds[1::2]
        return tuple(map(Event, repeat(rank), self.actions, starts, ends))


def on_one_clock(
    ranks: Sequence[tuple[int, float, tuple[Event, ...]]],
) -> tuple[tuple[Event, ...], ...]:
    """Return the events of all ranks on the clock of the first; clocks of hosts differ by days.

    `ranks`: for each the identity of its clock, that clock's time at a moment common to all ranks,
    and its events.
    """
    first_clock, first_s, _ = ranks[0]
    return tuple(
        events
        if clock == first_clock
        else tuple(_later(event, first_s - common_s) for event in events)
        for clock, common_s, events in ranks
    )


def _later(event: Event, by_s: float) -> Event:
    return event._replace(start_s=event.start_s + by_s, end_s=event.end_s + by_s)


class _OverlappedSpan:
    """An action that overlaps with compute; another thread may set its end."""

    def __init__(self, action: Action, start: Mark) -> None:
        self._action, self._start = action, start
        self._end: Mark | None = None

    def end(self, mark: Callable[[], Mark]) -> None:
        self._end = mark()

    def span(self, mark: Callable[[], Mark]) -> ActionSpan:
        """Return its span, until now if it has not ended."""
        return ActionSpan(self._action, self._start, mark() if self._end is None else self._end)


class StepMarks:
    """Start and end of each action of one step, as marks that are read on demand."""

    def __init__(self, mark: Callable[[], Mark], begin: StepStart | None = None) -> None:
        """`mark` returns the current mark; `begin` is the start of the step on an accelerator."""
        self._begin, self._mark = begin, mark
        self.spans: list[ActionSpan] = []  # of compute
        self._overlapped: list[_OverlappedSpan] = []
        self._read: ActionTimes | None = None

    def add(self, action: Action, start: Mark) -> None:
        """Record that an action ran from `start` until now."""
        self.spans.append(ActionSpan(action, start, self._mark()))

    def add_overlapped(self, action: Action, start: Mark, pending: CollectiveHandle) -> None:
        """Record an action that overlaps with compute, from `start` until `pending` is done."""
        overlapped = _OverlappedSpan(action, start)
        self._overlapped.append(overlapped)
        pending.when_done(partial(overlapped.end, self._mark))

    @property
    def moments(self) -> ActionTimes:
        """Return the step's actions in seconds of the host's monotonic clock; marks are read once.

        Overlapping actions that have not ended are taken to end now.
        """
        num_marked = len(self.spans) + len(self._overlapped)
        if self._read is None or len(self._read.actions) != num_marked:
            overlapped = [each.span(self._mark) for each in self._overlapped]
            self._read = self._moments([*self.spans, *overlapped])
        return self._read

    @property
    def times(self) -> StepTimes:
        """Return when this rank computed; overlapping actions may still be running."""
        return self._moments(self.spans).times

    def _moments(self, spans: Sequence[ActionSpan]) -> ActionTimes:
        marks = (mark for span in spans for mark in (span.start, span.end))
        return ActionTimes(
            tuple(span.action for span in spans), array("d", map(self._seconds, marks))
        )

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._begin is not None, "a device's marks have a beginning"
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

    def add_overlapped(self, action: Action, start: Mark, pending: CollectiveHandle) -> None:
        """Record an action that overlaps with compute, from `start` until `pending` is done."""
        self.step.add_overlapped(action, start, pending)
