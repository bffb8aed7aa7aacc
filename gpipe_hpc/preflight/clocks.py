"""Lower bound of the clock differences between hosts, from the times of one barrier.

No rank leaves a barrier before all ranks have entered. So if a rank left, by its clock, before
another entered, by that one's clock, the two clocks differ by at least that much.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from gpipe_hpc.comm.collectives.group import Gathering, meet


class Reading(NamedTuple):
    """A rank's wall clock time in seconds since 1970."""

    wall_s: float
    rank: int
    host: str

    def __str__(self) -> str:
        """Name the rank and host for messages."""
        return f"rank {self.rank} on {self.host}"


class ClockBounds(NamedTuple):
    """The latest entry of any rank into a barrier and the earliest exit, by their own clocks."""

    came: Reading
    left: Reading

    @property
    def skew_s(self) -> float:
        """Return the proven clock difference of the two ranks; 0 if none is proven."""
        return max(0.0, self.came.wall_s - self.left.wall_s)


def attend(
    everybody: Gathering, rank: int, host: str, clock: Callable[[], float] = time.time
) -> ClockBounds:
    """Run a barrier and return this rank's times of entry and exit.

    A first barrier lets all ranks enter the second at about the same time.
    """
    meet(everybody)
    came_s = clock()
    meet(everybody)
    return ClockBounds(Reading(came_s, rank, host), Reading(clock(), rank, host))


def farthest(ahead: ClockBounds, behind: ClockBounds) -> ClockBounds:
    """Merge two attendances, for `Gathering.merge_object`."""
    return ClockBounds(max(ahead.came, behind.came), min(ahead.left, behind.left))
