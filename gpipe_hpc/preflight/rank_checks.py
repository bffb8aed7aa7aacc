"""Check all ranks just before the first step of a run, with two small collectives.

Only warnings are logged, because plans may overestimate; conditions that would certainly end a run
raise errors elsewhere.
"""

import logging
import socket
from typing import Final, NamedTuple

from gpipe_hpc.checkpoint.in_memory.placement import CopyPlacement
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.device.host.open_files import allow_files, num_open
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.preflight.clocks import ClockBounds, merge_clock_bounds, timed_barrier
from gpipe_hpc.preflight.memory_needs import (
    NOTHING_KEPT,
    KeptCopies,
    MemoryNeed,
    MemoryNeeds,
    own_memory_needs,
)
from gpipe_hpc.settings import Config

log = logging.getLogger("gpipe_hpc.train")

SPARE_FILES: Final = 256
"""Number of files that a run opens besides its connections: data shards, checkpoints, logs."""
MOST_SKEW_S: Final = 1.0
"""Larger clock differences make logs, file times and lock ages misleading."""


class OpenFiles(NamedTuple):
    """Number of open files and connections that a process will need, and its limit."""

    lack: int
    rank: int
    host: str
    needed: int
    allowed: int

    @classmethod
    def of(cls, rank: int) -> "OpenFiles":
        """Raise this process's limit of open files if needed and allowed; return the counts."""
        needed = num_open() + SPARE_FILES
        allowed = allow_files(needed)
        return cls(needed - allowed, rank, socket.gethostname(), needed, allowed)

    def __str__(self) -> str:
        """Describe the missing open files and the remedy."""
        return (
            f"open files: rank {self.rank} on {self.host} needs up to {self.needed} files and "
            f"connections, but its limit is {self.allowed}; raise the limit in the environment "
            f"that starts the ranks (ulimit -Hn, LimitNOFILE)"
        )


class RankFindings(NamedTuple):
    """Findings about some ranks, reduced to the worst of each kind to keep messages small."""

    attendance: ClockBounds
    files: OpenFiles
    needs: dict[str, MemoryNeeds]

    def merge(self, behind: "RankFindings") -> "RankFindings":
        """Return these findings merged with those of later ranks."""
        kinds = [*self.needs, *(kind for kind in behind.needs if kind not in self.needs)]
        none = MemoryNeeds()
        return RankFindings(
            merge_clock_bounds(self.attendance, behind.attendance),
            max(self.files, behind.files),
            {k: self.needs.get(k, none).merge(behind.needs.get(k, none)) for k in kinds},
        )

    def lacking(self) -> list[str]:
        """Return one sentence for each resource that is insufficient."""
        needs = [str(need) for each in self.needs.values() for need in each.lacking()]
        return [*needs, *([str(self.files)] if self.files.lack > 0 else [])]


def skew_text(attendance: ClockBounds) -> str | None:
    """Describe which two clocks differ too much, or return None if none do."""
    if attendance.skew_s <= MOST_SKEW_S:
        return None
    came, left = attendance
    return (
        f"clocks: the clock of {came} is {attendance.skew_s:.1f} s ahead of that of {left}, at "
        f"most {MOST_SKEW_S:g} s are allowed; synchronize all hosts with one service (chrony, ntpd)"
    )


def needs_by_kind(needs: tuple[MemoryNeed, ...]) -> dict[str, MemoryNeeds]:
    """Return memory needs by the name of the memory."""
    return {need.what: MemoryNeeds((need,)) for need in needs}


def collect_findings(
    config: Config, world: World, planned: RankForecast | None, kept: KeptCopies
) -> RankFindings:
    """Check memory, open files and clocks of all ranks; return the merged findings; collective.

    The pipelines are already built.
    """
    needs = own_memory_needs(config, world.device, world.rank, planned, is_built=True, kept=kept)
    files = OpenFiles.of(world.rank)
    attendance = timed_barrier(world.world_group, world.rank, socket.gethostname())
    own = RankFindings(attendance, files, needs_by_kind(needs))
    return world.world_group.merge_object(own, RankFindings.merge)


def check_before_run(
    config: Config, world: World, planned: RankForecast | None, place: CopyPlacement | None = None
) -> None:
    """Warn, on rank 0, of resources that may not suffice for this run; collective.

    The pipelines are already built.

    Args:
      planned: memory forecast of this rank.
      place: where in-memory checkpoints of this rank are stored; None if there are none.
    """
    if not config.preflight.before_run:
        return
    with collective_errors(world, "checking all ranks before the first step"):
        found = collect_findings(
            config, world, planned, NOTHING_KEPT if place is None else KeptCopies.at(place)
        )
    if world.rank == 0:
        for text in [*found.lacking(), skew_text(found.attendance)]:
            if text is not None:
                log.warning("%s; run python -m gpipe_hpc.preflight for details", text)
