"""When the actions of a step began and ended."""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

from gpipe_hpc.comm.collectives.group import Pending
from gpipe_hpc.device.deferred import Mark, await_mark, seconds_between
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.device import Event as DeviceEvent
from gpipe_hpc.schedule import Action, Event
from gpipe_hpc.schedule.table.actions import COMPUTE

Now = Callable[[], float]


class Beginning:
    """The first mark of a step, and the host's moment of it.

    `put_s`: when the host put it there. `before`: that of the step before, from which the moment is
    reckoned; None where the device had no work and came there at once.
    """

    def __init__(
        self, mark: DeviceEvent, put_s: float, before: "Beginning | None", now: Now
    ) -> None:
        self.mark = mark
        self._put_s, self._seen_s, self._before, self._now = put_s, float("inf"), before, now

    def look(self) -> bool:
        """Say whether the device has come to the mark; if so it was no later than now."""
        if self._seen_s == float("inf") and self.mark.query():
            self._seen_s = self._now()
        return self._seen_s < float("inf")

    def seconds(self) -> float:
        """Return the moment in seconds; the mark is done."""
        if self._before is not None:
            earlier = self._before
            self.look()
            reached_s = earlier.seconds() + earlier.mark.elapsed_ms(self.mark) / 1e3
            self._put_s = min(max(reached_s, self._put_s), self._seen_s)
            self._before = None
        return self._put_s


class DeviceClock:
    """Puts marks into the current stream, and knows the host's moments of those that begin a step.

    Waits for the device once, at the start.
    """

    def __init__(self, device: Device, now: Now = time.perf_counter) -> None:
        self._device, self._now = device, now
        device.synchronize()
        put_s = now()
        # Those that nobody may have read, the newest last.
        self._steps = deque([Beginning(self._marked(), put_s, None, now)])
        self._is_new = False

    def mark(self) -> DeviceEvent:
        """Put a mark at the end of the current stream."""
        if self._is_new:
            self._is_new = False
            self._steps[-1].look()
        return self._marked()

    def begin(self) -> Beginning:
        """Begin a step."""
        while len(self._steps) > 1 and self._steps[1].look():
            self._steps.popleft()
            self._steps[0].seconds()  # lets go of the step before it
        put_s = self._now()
        self._steps.append(Beginning(self._marked(), put_s, self._steps[-1], self._now))
        self._is_new = True
        return self._steps[-1]

    def _marked(self) -> DeviceEvent:
        mark = self._device.event(timing=True)
        mark.record()
        return mark


class Span(NamedTuple):
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

    Compute, and what ran beside it: reductions, and parameters that were gathered.
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


class _Beside:
    """Something that runs beside the compute; another thread may say when it is done."""

    def __init__(self, action: Action, start: Mark) -> None:
        self._action, self._start = action, start
        self._end: Mark | None = None

    def end(self, mark: Callable[[], Mark]) -> None:
        self._end = mark()

    def span(self, mark: Callable[[], Mark]) -> Span:
        """Return from when to when it ran; until now if nobody has said it yet."""
        return Span(self._action, self._start, mark() if self._end is None else self._end)


class StepMarks:
    """When the actions of one step ran: marks that are read when somebody asks."""

    def __init__(self, mark: Callable[[], Mark], begin: Beginning | None = None) -> None:
        """Begin; `mark` returns the present, `begin` is that of a device's marks."""
        self._begin, self._mark = begin, mark
        self.spans: list[Span] = []  # of compute
        self._beside: list[_Beside] = []
        self._read: ActionTimes | None = None

    def add(self, action: Action, start: Mark) -> None:
        """Note that an action ran from `start` until now."""
        self.spans.append(Span(action, start, self._mark()))

    def add_beside(self, action: Action, start: Mark, pending: Pending) -> None:
        """Note that something runs beside the compute, from `start` until it is done."""
        beside = _Beside(action, start)
        self._beside.append(beside)
        pending.when_done(partial(beside.end, self._mark))

    @property
    def moments(self) -> ActionTimes:
        """Return the step's actions in seconds of the host's monotonic clock; marks are read once.

        What is returned does not change any more. What ran beside compute is over.
        """
        num_marked = len(self.spans) + len(self._beside)
        if self._read is None or len(self._read.actions) != num_marked:
            beside = [each.span(self._mark) for each in self._beside]
            self._read = self._moments([*self.spans, *beside])
        return self._read

    @property
    def times(self) -> StepTimes:
        """Return when this rank computed; what ran beside it may be under way still."""
        return self._moments(self.spans).times

    def _moments(self, spans: Sequence[Span]) -> ActionTimes:
        marks = (mark for span in spans for mark in (span.start, span.end))
        return ActionTimes(
            tuple(span.action for span in spans), array("d", map(self._seconds, marks))
        )

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._begin is not None, "a device's marks have a beginning"
        await_mark(mark)
        return self._begin.seconds() + seconds_between(self._begin.mark, mark)


class Recorder:
    """Take marks around the actions of a step."""

    def __init__(self, device: Device) -> None:
        self._clock = DeviceClock(device) if device.is_accelerator else None
        self.mark: Callable[[], Mark] = self._clock.mark if self._clock else time.perf_counter
        self.step = StepMarks(self.mark)

    def start_step(self) -> None:
        """Begin a new step; whoever holds the last one's marks may read them still."""
        self.step = StepMarks(self.mark, self._clock.begin() if self._clock else None)

    def add_beside(self, action: Action, start: Mark, pending: Pending) -> None:
        """Note that something runs beside the compute, from `start` until it is done."""
        self.step.add_beside(action, start, pending)
