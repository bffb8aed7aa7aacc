"""Whether the memory of each host, or device, has room for what its ranks are planned to hold."""

import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.host.host_memory import free_bytes
from gpipe_hpc.comm.host.machine import kernel_identity, shared_identity
from gpipe_hpc.comm.world import World
from gpipe_hpc.config import Config
from gpipe_hpc.planning.forecast import RankForecast
from gpipe_hpc.planning.telling.units import bytes_text, ranges_text
from gpipe_hpc.training.neighbour import DEFAULT_FOLDER

_NUM_GENERATIONS: Final = 2  # of copies, with checkpoint.neighbour_every


class Room(NamedTuple):
    """Some ranks in a row, and the memory that they share; bytes, None where nobody tells.

    `place` tells one memory from others, `what` says in words which it is.
    """

    place: str
    what: str
    host: str
    ranks: tuple[int, int]  # the first and the last
    needed_bytes: int
    free_bytes: int | None

    @property
    def lack_bytes(self) -> int:
        """Return how much is lacking; below 0 where there is room."""
        return -1 if self.free_bytes is None else self.needed_bytes - self.free_bytes

    def __str__(self) -> str:
        """Return what is lacking, with what can be done."""
        first, last = self.ranks
        own = f"rank {first}" if first == last else f"ranks {ranges_text(range(first, last + 1))}"
        free = 0 if self.free_bytes is None else self.free_bytes
        return (
            f"{self.what} of {self.host}: expected room for the {bytes_text(self.needed_bytes)} "
            f"more that {own} are planned to hold, got {bytes_text(free)} free; end what else uses "
            f"it, use more hosts or stages, or less memory (python -m gpipe_hpc.plan says for what)"
        )


def count_copies(config: Config, world: World, host: str | None = None) -> int:
    """Return how many states a host is to keep in memory for each rank on it.

    Those of the rank itself and, where there are several hosts, those of one elsewhere. Every rank
    calls it. `host`: a text that ranks share where they share the folder of the copies.
    """
    if not config.checkpoint.neighbour_every:
        return 0
    own = host or shared_identity("mnt") or socket.gethostname()
    told = world.everybody.merge_object(own, lambda ahead, behind: ahead * (ahead == behind))
    return _NUM_GENERATIONS * (2 if told != own else 1)


def own_rooms(
    config: Config,
    device: Device,
    rank: int,
    planned: RankForecast | None,
    *,
    is_built: bool,
    num_copies: int = 0,
) -> tuple[Room, ...]:
    """Return what this rank needs of which memory; nothing where nothing is planned.

    `is_built`: its weights are there already. `num_copies`: states that its host keeps for it.
    """
    if planned is None:
        return ()
    state_bytes = planned.weight_bytes + planned.optimizer_bytes
    copies_bytes = num_copies * state_bytes
    needed_bytes = planned.total_bytes - (planned.weight_bytes if is_built else 0)
    host, ranks = socket.gethostname(), (rank, rank)
    if device.is_accelerator:
        free = device.memory_free()
        rooms = [Room(device.identity, f"{device.name}", host, ranks, needed_bytes, free)]
        host_bytes = copies_bytes + planned.saving_bytes
    else:
        rooms, host_bytes = [], needed_bytes + copies_bytes
    if host_bytes:
        # Containers of one kernel may have limits of their own, which control groups keep.
        place = f"{kernel_identity()} {shared_identity('cgroup')}"
        rooms.append(Room(place, "memory", host, ranks, host_bytes, free_bytes()))
    if copies_bytes:
        folder = Path(config.checkpoint.neighbour_dir or DEFAULT_FOLDER)
        place = f"{kernel_identity()} {shared_identity('mnt')} {folder}"
        rooms.append(Room(place, str(folder), host, ranks, copies_bytes, _free_in(folder)))
    return tuple(rooms)


def _free_in(folder: Path) -> int | None:
    """Return how much can be written into a folder, or into the nearest above it that is there."""
    for each in (folder, *folder.absolute().parents):
        if os.path.isdir(each):
            return shutil.disk_usage(each).free
    return None


class Rooms(NamedTuple):
    """The memory of some ranks in a row, of one kind: no more than three are kept.

    Ranks of a host follow one another as a rule. So those in the midst are whole, and of them that
    which lacks most is enough; the first and the last may go on with the ranks beside.
    """

    kept: tuple[Room, ...] = ()

    def then(self, behind: "Rooms") -> "Rooms":
        """Return what is known of these ranks and of those behind them."""
        if not self.kept or not behind.kept:
            return self if self.kept else behind
        (*ahead, last), (first, *others) = self.kept, behind.kept
        middle = [last, first]
        if last.place == first.place:
            frees = [each for each in (last.free_bytes, first.free_bytes) if each is not None]
            middle = [
                last._replace(
                    ranks=(last.ranks[0], first.ranks[1]),
                    needed_bytes=last.needed_bytes + first.needed_bytes,
                    free_bytes=min(frees, default=None),
                )
            ]
        return Rooms(_few([*ahead, *middle, *others]))

    def lacking(self) -> list[Room]:
        """Return the memory, of that which is kept, that has too little."""
        return [room for room in self.kept if room.lack_bytes > 0]


def _few(rooms: Sequence[Room]) -> tuple[Room, ...]:
    if len(rooms) <= 3:
        return tuple(rooms)
    worst = max(rooms[1:-1], key=lambda room: room.lack_bytes)
    return rooms[0], worst, rooms[-1]
