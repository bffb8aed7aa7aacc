"""Happens-before relations between streams, events and hosts, tracked with vector clocks.

Lamport, Time, clocks, and the ordering of events in a distributed system, 1978; Mattern, Virtual
time and global states of distributed systems, 1989. A stream counts its works; a clock contains,
for each stream, the number of the last work known to be complete.
"""

import threading
from dataclasses import dataclass, field

Clock = dict[int, int]
"""By the number of a stream: the last of its works that is known to be over."""


def learn(clock: Clock, other: Clock) -> None:
    """Merge one clock into another."""
    for line, time in other.items():
        if clock.get(line, 0) < time:
            clock[line] = time


class Own(threading.local):
    """The clock of one thread of a host."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0

    def knows(self, clock: Clock) -> bool:
        """Return whether all works in a clock are known to be complete."""
        return all(self.clock.get(line, 0) >= time for line, time in clock.items())


class Host:
    """The works known to be complete by the host of one rank.

    `clock` covers the waits of all its threads; if host memory is passed between threads, the next
    thread knows these. Work launched by a thread is ordered after the waits of that thread.
    """

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.own = Own()

    def learn(self, clock: Clock) -> None:
        """Record that the calling thread has waited for all works in a clock."""
        learn(self.clock, clock)
        learn(self.own.clock, clock)
        self.own.version += 1


@dataclass
class Line:
    """A stream as a sequence of works, each ordered after the previous one."""

    number: int
    host: Host
    clock: Clock = field(default_factory=dict)
    time: int = 0
    heard: tuple[int, int] = (0, 0)  # the thread that launched the last work, and what it knew

    def launch(self) -> int:
        """Start the next work, ordered after all waits of the host; return its number."""
        self.hear()
        self.time += 1
        self.clock[self.number] = self.time
        return self.time

    def hear(self) -> None:
        """Order the stream after all waits of the calling thread."""
        own = self.host.own
        now = threading.get_ident(), own.version
        if self.heard != now:
            learn(self.clock, own.clock)
            self.heard = now

    def knows(self, line: int, time: int) -> bool:
        """Return whether a work of another stream is complete before the next work of this one."""
        return self.clock.get(line, 0) >= time
