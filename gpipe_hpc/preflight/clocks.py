"""Lower bound of the clock differences between hosts, from the times of one barrier.

No rank leaves a barrier before all ranks have entered. So if rank A left before rank B entered,
each by its own clock, the two clocks differ by at least that time.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from gpipe_hpc.comm.collectives.group import ControlGroup, barrier


class ClockReading(NamedTuple):
    """Wall clock time of a rank in seconds since 1970."""

    wall_s: float
    rank: int
    host: str

    def __str__(self) -> str:
        """Name the rank and host for messages."""
        return f"rank {self.rank} on {self.host}"


class ClockBounds(NamedTuple):
    """Latest entry of any rank into a barrier and earliest exit, each by the rank's own clock."""

    entry: ClockReading
    exit: ClockReading

    @property
    def skew_s(self) -> float:
        """Return the proven difference of the two ranks' clocks in seconds; 0 if none is proven."""
        return max(0.0, self.entry.wall_s - self.exit.wall_s)


def timed_barrier(
    world_group: ControlGroup, rank: int, host: str, clock: Callable[[], float] = time.time
) -> ClockBounds:
    """Run a barrier and return the times at which this rank entered and left.

    A barrier before it lets all ranks enter at about the same time.
    """
    barrier(world_group)
    came_s = clock()
    barrier(world_group)
    return ClockBounds(ClockReading(came_s, rank, host), ClockReading(clock(), rank, host))


def merge_clock_bounds(ahead: ClockBounds, behind: ClockBounds) -> ClockBounds:
    """Return the latest entry and the earliest exit of two; used by `ControlGroup.merge_object`."""
    return ClockBounds(max(ahead.entry, behind.entry), min(ahead.exit, behind.exit))
