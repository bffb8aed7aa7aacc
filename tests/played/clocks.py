"""Who knows that what is over: vector clocks of streams, marks and hosts.

Lamport, Time, clocks, and the ordering of events in a distributed system, 1978; Mattern, Virtual
time and global states of distributed systems, 1989. A stream counts what it does; a clock says of
each stream up to which of its works all is known to be over.
"""

import threading
from dataclasses import dataclass, field

Clock = dict[int, int]
"""By the number of a stream: the last of its works that is known to be over."""


def learn(clock: Clock, other: Clock) -> None:
    """Let one clock know what another knows."""
    for line, time in other.items():
        if clock.get(line, 0) < time:
            clock[line] = time


class Own(threading.local):
    """What one thread of a host has waited for."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0

    def knows(self, clock: Clock) -> bool:
        """Say whether all that a clock says is known to be over."""
        return all(self.clock.get(line, 0) >= time for line, time in clock.items())


class Host:
    """What the host of one rank knows to be over.

    `clock`: what any of its threads has waited for; where memory of the host is handed from thread
    to thread, that is what the next one knows. What a thread launches comes behind what it has
    waited for itself.
    """

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.own = Own()

    def learn(self, clock: Clock) -> None:
        """Let the calling thread wait for all that a clock says."""
        learn(self.clock, clock)
        learn(self.own.clock, clock)
        self.own.version += 1


@dataclass
class Line:
    """One stream as a line of works, each behind the one before it."""

    number: int
    host: Host
    clock: Clock = field(default_factory=dict)
    time: int = 0
    heard: tuple[int, int] = (0, 0)  # the thread that launched the last work, and what it knew

    def launch(self) -> int:
        """Begin the next work, behind all that the host has waited for; return its number."""
        self.hear()
        self.time += 1
        self.clock[self.number] = self.time
        return self.time

    def hear(self) -> None:
        """Come behind all that the calling thread has waited for."""
        own = self.host.own
        now = threading.get_ident(), own.version
        if self.heard != now:
            learn(self.clock, own.clock)
            self.heard = now

    def knows(self, line: int, time: int) -> bool:
        """Say whether a work of a line is over, wherever this line goes on."""
        return self.clock.get(line, 0) >= time
