"""Streams and events of a simulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulated.clocks import Clock, Line, learn
from tests.simulated.errors import EventError
from tests.simulated.locations import where

if TYPE_CHECKING:
    from tests.simulated.device import SimulatedDevice


class SimulatedStream:
    """A stream: its works, and the waits on it and for it."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.line = Line(device.tracker.next_line(), device.host)

    def wait_event(self, event: SimulatedEvent) -> None:
        if self.device.does("wait_event"):
            self._learn(event.clock)

    def wait_stream(self, other: SimulatedStream) -> None:
        if self.device.does("wait_stream"):
            other.line.hear()
            self._learn(other.line.clock)

    def _learn(self, clock: Clock) -> None:
        with self.device.tracker.lock:
            self.device.tracker.hear_of_deaths()
            self.line.hear()
            learn(self.line.clock, clock)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent(self.device, timing=False) if event is None else event
        if self.device.does("record_event"):
            event.take(self)
        return event

    def synchronize(self) -> None:
        if self.device.does("synchronize"):
            self.device.waits("stream.synchronize", self.line.clock)


class SimulatedEvent:
    """An event: the clock of its stream when it was recorded."""

    def __init__(self, device: SimulatedDevice, *, timing: bool) -> None:
        self.device, self.timing = device, timing
        self.clock: Clock = {}
        self._was_asked = False
        self._at = 0

    def take(self, stream: SimulatedStream) -> None:
        with self.device.tracker.lock:
            self.device.tracker.hear_of_deaths()
            stream.line.hear()
            self.clock, self._was_asked = dict(stream.line.clock), False
            self._at = self.device.tick()

    def record(self, stream: SimulatedStream | None = None) -> None:
        if self.device.does("record"):
            self.take(stream or self.device.current_stream())

    def query(self) -> bool:
        """Return False on the first call, because a device may be late, then True."""
        if not self.device.does("query"):
            return True
        host = self.device.host
        is_known = all(host.clock.get(line, 0) >= time for line, time in self.clock.items())
        if not is_known and not self._was_asked:
            self._was_asked = True
            return False
        host.learn(self.clock)
        return True

    def synchronize(self) -> None:
        if self.device.does("synchronize"):
            self.device.waits("event.synchronize", self.clock)

    def elapsed_ms(self, later: SimulatedEvent) -> float:
        assert self.timing and later.timing, f"{where()}: marks without timing have no time"
        for mark in (self, later):
            host = self.device.host.clock
            if not mark._at:
                self._refuse("one that was never recorded")
            if any(host.get(line, 0) < time for line, time in mark.clock.items()):
                self._refuse("one that the host has not waited for")
        return float(later._at - self._at)

    def _refuse(self, what: str) -> None:
        fault = EventError(f"elapsed_ms at {where()}: expected marks that are done, got {what}")
        self.device.tracker.found(fault)
