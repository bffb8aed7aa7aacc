"""Check that the memory of each host and device suffices for its ranks, as planned."""

import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_hpc.checkpoint.in_memory import DEFAULT_FOLDER
from gpipe_hpc.checkpoint.in_memory.placement import CopyPlacement
from gpipe_hpc.comm.collectives.group import barrier
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.host_memory import free_bytes
from gpipe_hpc.device.host.machine import kernel_identity, shared_identity
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.settings import Config
from gpipe_hpc.units import bytes_text, ranges_text

_NUM_GENERATIONS: Final = 2  # in-memory checkpoints kept, with checkpoint.neighbour_every


class MemoryNeed(NamedTuple):
    """Planned and free bytes of a memory that consecutive ranks share.

    Attributes:
      place: identifier of the memory.
      what: name of the memory for messages.
      ranks: first and last rank.
      free_bytes: None if the system does not report it.
    """

    place: str
    what: str
    host: str
    ranks: tuple[int, int]  # the first and the last
    needed_bytes: int
    free_bytes: int | None

    @property
    def lack_bytes(self) -> int:
        """Return the missing bytes; negative if the memory suffices or its size is unknown."""
        return -1 if self.free_bytes is None else self.needed_bytes - self.free_bytes

    def __str__(self) -> str:
        """Describe the missing memory and its remedies."""
        first, last = self.ranks
        own = f"rank {first}" if first == last else f"ranks {ranges_text(range(first, last + 1))}"
        free = 0 if self.free_bytes is None else self.free_bytes
        return (
            f"{self.what} of {self.host}: {own} will need {bytes_text(self.needed_bytes)} more, "
            f"but only {bytes_text(free)} are free; end other processes that use it, use more "
            f"hosts or stages, or reduce the memory (python -m gpipe_hpc.plan shows its use)"
        )


class KeptCopies(NamedTuple):
    """Number of in-memory checkpoints that a host keeps per rank.

    `is_shared`: whether their folder is on storage shared by all hosts.
    """

    num_states: int = 0
    is_shared: bool = False

    @classmethod
    def at(cls, place: CopyPlacement) -> "KeptCopies":
        """Return the number of in-memory checkpoints per rank, given the rank's place among hosts.

        The host keeps the states of its own ranks and, if there are several hosts, those of ranks
        on another host.
        """
        return cls(_NUM_GENERATIONS * (1 if place.num_hosts == 1 else 2), place.is_shared)


NOTHING_KEPT: Final = KeptCopies()


def probe_copies(config: Config, world: World) -> KeptCopies:
    """Determine how many in-memory checkpoints this rank's host will keep; collective.

    Rank 0 creates a temporary file; a rank that cannot see it counts as on another host.
    """
    if not config.checkpoint.neighbour_every:
        return NOTHING_KEPT
    folder = _existing(folder_of_copies(config))
    token = world.world_group.broadcast_object(secrets.token_hex(8), root=0)
    probe = folder / f".gpipe_hpc_{token}"
    try:
        if world.rank == 0:
            with suppress(OSError):  # the run itself reports the error
                probe.touch(exist_ok=False)
        barrier(world.world_group)
        own = probe.exists(), kernel_identity()
        is_one, machine = world.world_group.merge_object(own, _seen_by_both)
    finally:
        if world.rank == 0:
            with suppress(OSError):
                probe.unlink()
    return KeptCopies(_NUM_GENERATIONS * (1 if is_one else 2), is_shared=is_one and not machine)


def _seen_by_both(ahead: tuple[bool, str], behind: tuple[bool, str]) -> tuple[bool, str]:
    return ahead[0] and behind[0], ahead[1] if ahead[1] == behind[1] else ""


def folder_of_copies(config: Config) -> Path:
    """Return the folder in which in-memory checkpoints are stored."""
    return Path(config.checkpoint.neighbour_dir or DEFAULT_FOLDER)


def own_memory_needs(
    config: Config,
    device: Device,
    rank: int,
    planned: RankForecast | None,
    *,
    is_built: bool,
    kept: KeptCopies = NOTHING_KEPT,
) -> tuple[MemoryNeed, ...]:
    """Return the memory that this rank needs, one entry per memory; empty without a forecast.

    `is_built`: the rank's weights are already allocated. `kept`: in-memory checkpoints on its host.
    """
    if planned is None:
        return ()
    state_bytes = planned.weight_bytes + planned.optimizer_bytes
    copies_bytes = kept.num_states * state_bytes
    in_memory_bytes = 0 if kept.is_shared else copies_bytes
    needed_bytes = planned.total_bytes - (planned.weight_bytes if is_built else 0)
    host, ranks = socket.gethostname(), (rank, rank)
    if device.is_accelerator:
        free = device.memory_free()
        needs = [MemoryNeed(device.identity, f"{device.name}", host, ranks, needed_bytes, free)]
        host_bytes = in_memory_bytes + planned.saving_bytes + planned.offloaded_bytes
    else:
        needs, host_bytes = [], needed_bytes + in_memory_bytes
    if host_bytes:
        # Containers of one kernel may have separate limits, set by control groups.
        place = f"{kernel_identity()} {shared_identity('cgroup')}"
        needs.append(MemoryNeed(place, "memory", host, ranks, host_bytes, free_bytes()))
    if copies_bytes:
        folder = folder_of_copies(config)
        own = "" if kept.is_shared else f"{kernel_identity()} {shared_identity('mnt')} "
        place = f"{own}{folder}"
        needs.append(MemoryNeed(place, str(folder), host, ranks, copies_bytes, _free_in(folder)))
    return tuple(needs)


def _free_in(folder: Path) -> int:
    """Return the free bytes of a folder's file system; the folder need not exist."""
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    """Return a folder, or its nearest existing parent."""
    return next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each))


class MemoryNeeds(NamedTuple):
    """Needs of consecutive ranks for one kind of memory, reduced to at most three entries.

    Ranks of a host are normally consecutive. So entries in the middle are complete, and only the
    one with the largest shortage matters; the first and last may continue with neighbouring ranks.
    """

    kept: tuple[MemoryNeed, ...] = ()

    def merge(self, behind: "MemoryNeeds") -> "MemoryNeeds":
        """Return these needs merged with those of the following ranks."""
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
        return MemoryNeeds(_few([*ahead, *middle, *others]))

    def lacking(self) -> list[MemoryNeed]:
        """Return the needs that exceed the free memory."""
        return [need for need in self.kept if need.lack_bytes > 0]


def _few(needs: Sequence[MemoryNeed]) -> tuple[MemoryNeed, ...]:
    if len(needs) <= 3:
        return tuple(needs)
    worst = max(needs[1:-1], key=lambda need: need.lack_bytes)
    return needs[0], worst, needs[-1]
