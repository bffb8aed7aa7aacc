"""Who knows that what is over: vector clocks of streams, marks and hosts.

Lamport, Time, clocks, and the ordering of events in a distributed system, 1978; Mattern, Virtual
time and global states of distributed systems, 1989. A stream counts what it does; a clock says of
each stream up to which of its works all is known to be over.
"""

from dataclasses import dataclass, field

Clock = dict[int, int]
"""By the number of a stream: the last of its works that is known to be over."""


def learn(clock: Clock, other: Clock) -> None:
    """Let one clock know what another knows."""
    for line, time in other.items():
        if clock.get(line, 0) < time:
            clock[line] = time


@dataclass
class Host:
    """What the host of one rank knows to be over; everything it launches comes behind that.

    All threads of a rank share it: what one has waited for, the others are taken to know.
    """

    clock: Clock = field(default_factory=dict)
    version: int = 0

    def learn(self, clock: Clock) -> None:
        """Wait for all that a clock says is over."""
        learn(self.clock, clock)
        self.version += 1


@dataclass
class Line:
    """One stream as a line of works, each behind the one before it."""

    number: int
    host: Host
    clock: Clock = field(default_factory=dict)
    time: int = 0
    version: int = -1  # of what the host knew when it launched the last work

    def launch(self) -> int:
        """Begin the next work, behind all that the host knows; return its number."""
        self.hear()
        self.time += 1
        self.clock[self.number] = self.time
        return self.time

    def hear(self) -> None:
        """Come behind all that the host knows."""
        if self.version != self.host.version:
            learn(self.clock, self.host.clock)
            self.version = self.host.version

    def knows(self, line: int, time: int) -> bool:
        """Say whether a work of a line is over, wherever this line goes on."""
        return self.clock.get(line, 0) >= time
