"""The look at all ranks just before the first step of a run: what it costs is two small meetings.

What would surely end a run is refused elsewhere; this warns, since a plan may ask for too much.
"""

import logging
import socket
from typing import Final, NamedTuple

from gpipe_hpc.checkpoint.in_memory.place import Place
from gpipe_hpc.comm.world.world import World, together
from gpipe_hpc.device.host.open_files import allow_files, num_open
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.preflight.clocks import Attendance, attend, farthest
from gpipe_hpc.preflight.room import NOTHING_KEPT, Kept, Room, Rooms, own_rooms
from gpipe_hpc.settings import Config

log = logging.getLogger("gpipe_hpc.train")

SPARE_FILES: Final = 256
"""What a run opens beside its connections: shards of data, checkpoints, logs."""
MOST_SKEW_S: Final = 1.0
"""Clocks further apart mislead: logs, times of files, who held a lock last."""


class Files(NamedTuple):
    """How many files and connections a process has open and will need, and how many it may have."""

    lack: int
    rank: int
    host: str
    needed: int
    allowed: int

    @classmethod
    def of(cls, rank: int) -> "Files":
        """Return this process's, its limit raised as far as it may be."""
        needed = num_open() + SPARE_FILES
        allowed = allow_files(needed)
        return cls(needed - allowed, rank, socket.gethostname(), needed, allowed)

    def __str__(self) -> str:
        """Return what is lacking, with what can be done."""
        return (
            f"open files: rank {self.rank} on {self.host} expected to open up to {self.needed} "
            f"files and connections, got a limit of {self.allowed}; raise it where the ranks are "
            f"started (ulimit -Hn, LimitNOFILE)"
        )


class Found(NamedTuple):
    """What is known of some ranks: the worst of each kind alone, so that little travels."""

    attendance: Attendance
    files: Files
    rooms: dict[str, Rooms]

    def then(self, behind: "Found") -> "Found":
        """Return what is known of these ranks and of those behind them."""
        kinds = [*self.rooms, *(kind for kind in behind.rooms if kind not in self.rooms)]
        none = Rooms()
        return Found(
            farthest(self.attendance, behind.attendance),
            max(self.files, behind.files),
            {k: self.rooms.get(k, none).then(behind.rooms.get(k, none)) for k in kinds},
        )

    def lacking(self) -> list[str]:
        """Return what is too little, each in a sentence."""
        rooms = [str(room) for each in self.rooms.values() for room in each.lacking()]
        return [*rooms, *([str(self.files)] if self.files.lack > 0 else [])]


def skew_text(attendance: Attendance) -> str | None:
    """Return whose clocks are too far apart, in a sentence; None if no ones are."""
    if attendance.skew_s <= MOST_SKEW_S:
        return None
    came, left = attendance
    return (
        f"clocks: expected those of all hosts within {MOST_SKEW_S:g} s, got that of {came} "
        f"{attendance.skew_s:.1f} s ahead of that of {left}; let one service set all (chrony, ntpd)"
    )


def kinds_of(rooms: tuple[Room, ...]) -> dict[str, Rooms]:
    """Return each kind of memory by itself."""
    return {room.what: Rooms((room,)) for room in rooms}


def look_at(config: Config, world: World, planned: RankForecast | None, kept: Kept) -> Found:
    """Return what all ranks have found, their pipelines built; every rank calls it."""
    rooms = own_rooms(config, world.device, world.rank, planned, is_built=True, kept=kept)
    files = Files.of(world.rank)
    attendance = attend(world.everybody, world.rank, socket.gethostname())
    own = Found(attendance, files, kinds_of(rooms))
    return world.everybody.merge_object(own, Found.then)


def look_before_run(
    config: Config, world: World, planned: RankForecast | None, place: Place | None = None
) -> None:
    """Warn, on rank 0, of what this run may lack; every rank calls it, its pipeline built.

    `planned`: what this rank is to hold. `place`: where copies of its state go, None without.
    """
    if not config.preflight.before_run:
        return
    with together(world, "looking at all ranks before the first step"):
        found = look_at(config, world, planned, NOTHING_KEPT if place is None else Kept.at(place))
    if world.rank == 0:
        for told in [*found.lacking(), skew_text(found.attendance)]:
            if told is not None:
                log.warning("%s; run python -m gpipe_hpc.preflight for details", told)
