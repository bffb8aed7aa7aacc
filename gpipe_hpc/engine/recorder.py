"""When the actions of a step began and ended."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpipe_hpc.schedule import Action, Event


class Span(NamedTuple):
    """An action between two marks."""

    action: Action
    start: object
    end: object


class StepTimes(NamedTuple):
    """When a rank computed in a step: for how long in all, and between which moments.

    Seconds of the host's monotonic clock. A rank that computed nothing has no moments: its start
    is later, and its end earlier, than any other.
    """

    busy_s: float
    start_s: float = math.inf
    end_s: float = -math.inf


class Recorded(NamedTuple):
    """What a rank tells of a step: its clock, that clock's time when all met, and its events."""

    clock: int
    met_s: float
    events: tuple[Event, ...]


def on_one_clock(ranks: Sequence[Recorded]) -> tuple[tuple[Event, ...], ...]:
    """Return the events of all ranks on the clock of the first; clocks of hosts differ by days."""
    first = ranks[0]
    return tuple(
        each.events
        if each.clock == first.clock
        else tuple(_later(event, first.met_s - each.met_s) for event in each.events)
        for each in ranks
    )


def _later(event: Event, by_s: float) -> Event:
    return event._replace(start_s=event.start_s + by_s, end_s=event.end_s + by_s)


class Recorder:
    """Take marks around actions and turn them into events, in seconds.

    On a CPU a mark is `time.perf_counter()`: one clock for all processes of a host. On CUDA it
    is an event on the current stream; reading them waits for the device, taking them does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.spans: list[Span] = []
        self.begin: object = None
        self._host_begin_s = 0.0

    def mark(self) -> object:
        """Return the present."""
        if not self._on_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event
        mark = event(enable_timing=True)
        mark.record()
        return mark

    def start_step(self) -> None:
        """Forget the last step's spans and begin a new one."""
        self.spans = []
        self._host_begin_s = time.perf_counter()
        self.begin = self.mark()

    def add(self, action: Action, start: object) -> None:
        """Note that an action ran from `start` until now."""
        self.spans.append(Span(action, start, self.mark()))

    @property
    def times(self) -> StepTimes:
        """Return when this rank computed."""
        if not self.spans:
            return StepTimes(0.0)
        moments = [(self._seconds(span.start), self._seconds(span.end)) for span in self.spans]
        busy_s = sum(end - start for start, end in moments)
        return StepTimes(busy_s, moments[0][0], max(end for _, end in moments))

    def events(self, rank: int) -> tuple[Event, ...]:
        """Return the step's events, in seconds of the host's monotonic clock."""
        return tuple(
            Event(rank, span.action, self._seconds(span.start), self._seconds(span.end))
            for span in self.spans
        )

    def _seconds(self, mark: object) -> float:
        if isinstance(mark, float):
            return mark
        assert isinstance(mark, torch.cuda.Event) and isinstance(self.begin, torch.cuda.Event)
        mark.synchronize()
        return self._host_begin_s + float(self.begin.elapsed_time(mark)) / 1e3
