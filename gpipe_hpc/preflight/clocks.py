"""How far apart the clocks of hosts are, by what all ranks can know of one meeting.

Nobody leaves a meeting before everybody has come. So where a rank left it, by its own clock,
before another had come, by that one's, the clocks of both are apart by that much at least.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from gpipe_hpc.comm.collectives.group import Gathering, meet


class Reading(NamedTuple):
    """The time of day on a rank's host, in seconds since 1970."""

    wall_s: float
    rank: int
    host: str

    def __str__(self) -> str:
        """Return whose clock it is, for messages."""
        return f"rank {self.rank} on {self.host}"


class Attendance(NamedTuple):
    """When ranks came to a meeting and left it: the latest that came, the earliest that left."""

    came: Reading
    left: Reading

    @property
    def skew_s(self) -> float:
        """Return by how much the clocks of the two differ at least; 0 where none is known to."""
        return max(0.0, self.came.wall_s - self.left.wall_s)


def attend(
    everybody: Gathering, rank: int, host: str, clock: Callable[[], float] = time.time
) -> Attendance:
    """Meet all ranks, and note by this host's clock when this one came and left.

    They meet once before, so that all come at about the same time.
    """
    meet(everybody)
    came_s = clock()
    meet(everybody)
    return Attendance(Reading(came_s, rank, host), Reading(clock(), rank, host))


def farthest(ahead: Attendance, behind: Attendance) -> Attendance:
    """Return what tells most of how far clocks are apart, for `Gathering.merge_object`."""
    return Attendance(max(ahead.came, behind.came), min(ahead.left, behind.left))
