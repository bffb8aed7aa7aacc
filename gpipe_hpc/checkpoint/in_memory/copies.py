"""Where each rank's copies go, and how two generations of them are kept.

A rank's state is kept on its own host, for when processes die, and on another one, for when the
host does. The state of step N is written while that of the one before is whole on every host; only
when all ranks have written N may the older one go. So a kill at any moment leaves one whole
generation.
"""

import logging
import socket
import time
import uuid
from collections.abc import Mapping
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from gpipe_hpc.checkpoint.host_copy import HostBuffer
from gpipe_hpc.checkpoint.in_memory.files import NO_STARTS, START, CopyFolder, CopyWriter
from gpipe_hpc.checkpoint.in_memory.finding import Found, find
from gpipe_hpc.checkpoint.in_memory.place import Place, find_place
from gpipe_hpc.checkpoint.rank_state import StateError, fits, pack, restore, unpack
from gpipe_hpc.comm.collectives.group import meet
from gpipe_hpc.comm.transport.byte_moves import ByteMoves, Move
from gpipe_hpc.comm.world.world import World, together
from gpipe_hpc.errors import ConfigError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

log = logging.getLogger("gpipe_hpc.train")

_SAVING, _RESTORING = 0, 1  # serials of byte moves
_ON_ONE_HOST: Final = (
    "checkpoint.neighbour_every: all ranks are on one host, so copies stay in its memory: they "
    "outlive a killed process, not the host"
)


def _shared(folder: CopyFolder) -> str:
    return (
        f"checkpoint.neighbour_dir: expected a folder of each host's own memory, got one that "
        f"several machines share, {folder.path}; each state is kept there once, as fast and as "
        f"safe as that file system is; choose another for copies in memory"
    )


class NeighbourCopies:
    """The copies of a run's states, on all hosts; every method is called by all ranks."""

    def __init__(
        self,
        world: World,
        folder: CopyFolder,
        place: Place,
        about: Mapping[str, Any],
        start: str,
    ) -> None:
        self._world = world
        self._folder = folder
        self.place = place
        self._about = dict(about)
        self.start = start  # told by every copy that is written from here on
        self._whole: list[int] = []  # steps of which all ranks have a copy, at most two
        self._buffer = HostBuffer(world.device)
        moves = [Move(source, world.rank) for source in place.sources]
        if place.holder != world.rank:
            moves.append(Move(world.rank, place.holder))
        self._moves = ByteMoves(world, moves, _SAVING)
        if world.rank == 0 and place.num_hosts == 1:
            log.warning(_shared(folder) if place.is_shared else _ON_ONE_HOST)

    def find(self) -> Found | None:
        """Return the newest state of this run in this layout that copies hold.

        None, with a line why, if none is whole; without a line if there are no copies.
        """
        with together(self._world, "looking for copies in memory"):
            return find(self._world, self._folder, self.place.here, self._about)

    def restore(
        self, found: Found, pipe: "Pipeline", optimizer: torch.optim.Optimizer
    ) -> dict[str, Any] | None:
        """Take over the state that was found; return what was kept with it.

        None, with nothing changed on any rank, if it does not fit the model.
        """
        with together(self._world, "taking over copies in memory"):
            own = self._bring(found)
            try:
                state = unpack(own)
                is_good = fits(pipe, state)
            except StateError:
                is_good = False
            if not self._world.everybody.merge_object(is_good, and_):
                return None
            restore(pipe, optimizer, state)
            self._whole = [found.step]
            extra: dict[str, Any] = found.about["extra"]
            return extra

    def forget_others(self) -> None:
        """Remove the copies that this start of the run does not go on from."""
        with together(self._world, "removing old copies in memory"):
            self._folder.keep(set(self._whole))
            self._folder.clear_forgotten()
            # Nobody writes before everybody has removed.
            meet(self._world.everybody)

    def save(
        self, pipe: "Pipeline", optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
    ) -> float:
        """Copy the state after this step; return how many seconds the step's edge took longer.

        Raises ConfigError on all ranks if the memory of a host has no room for two generations.
        """
        began_s = time.perf_counter()
        step = pipe.steps_done
        with together(self._world, "copying to a neighbour"):
            about = {**self._about, START: self.start, "extra": dict(extra)}
            own = pack(pipe, optimizer, about, self._buffer)
            self._whole = self._whole[-1:]
            self._folder.keep(set(self._whole))
            outgoing = {} if self.place.holder == self._world.rank else {self.place.holder: own}
            sizes = self._moves.tell_sizes(outgoing)
            failure = self._lacking(len(own) + sum(sizes.values()))
            if failure is not None and not self._whole:
                raise ConfigError(failure)
            failure = failure or self._write(step, own, outgoing, sizes)
            told = None if failure is None else (self._world.rank, failure)
            first = self._world.everybody.merge_object(told, lambda ahead, behind: ahead or behind)
        if first is None:
            self._whole.append(step)
        elif self._world.rank == 0:
            log.warning(
                "copies in memory of step %d are incomplete, for example on rank %d: %s",
                step,
                *first,
            )
        return time.perf_counter() - began_s

    def remove(self) -> None:
        """Remove the copies on this host, for good; no other rank is needed."""
        self._folder.remove(self.start)

    def _write(
        self,
        step: int,
        own: torch.Tensor,
        outgoing: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
    ) -> str | None:
        """Write the copies that this rank holds; return what failed."""
        here = self._world.rank
        writers: dict[int, CopyWriter] = {
            rank: self._folder.writing(rank, step) for rank in sorted({here, *sizes})
        }
        writers[here].write(own)
        self._moves.run(outgoing, sizes, lambda source, piece: writers[source].write(piece))
        for writer in writers.values():
            writer.close()
        failures = [str(writer.failure) for writer in writers.values() if writer.failure]
        return failures[0] if failures else None

    def _lacking(self, num_bytes: int) -> str | None:
        """Return, on all ranks, what the first host without room says.

        `num_bytes`: what this rank is to write.
        """
        world, here = self._world, self.place.here
        own = self._folder.say_need(world.rank, num_bytes)
        # Ranks of one host share the folder: none writes before all have removed.
        meet(world.everybody)
        if world.rank == here[0]:
            # The first time two generations are to come, later one.
            needed = self._folder.needed_bytes(here) * (1 if self._whole else 2)
            free = self._folder.free_bytes()
            lacking = (
                f"config: bad checkpoint.neighbour_every, expected {needed / 1e6:,.1f} MB free in "
                f"{self._folder.path} on {socket.gethostname()} for the copies, got "
                f"{free / 1e6:,.1f} MB; set checkpoint.neighbour_dir to a larger memory-backed "
                f"folder, or checkpoint.neighbour_every=0"
            )
            own = lacking if free < needed else own
        return world.everybody.merge_object(own, lambda ahead, behind: ahead or behind)

    def _bring(self, found: Found) -> torch.Tensor:
        """Return this rank's state, from whoever has read it."""
        rank, reader = self._world.rank, found.reader
        outgoing = {r: state for r, state in found.states.items() if r != rank}
        moves = [Move(rank, r) for r in outgoing]
        if reader != rank:
            moves.append(Move(reader, rank))
        by_bytes = ByteMoves(self._world, moves, _RESTORING)
        sizes = by_bytes.tell_sizes(outgoing)
        pieces: list[torch.Tensor] = []
        by_bytes.run(outgoing, sizes, lambda _, piece: pieces.append(piece.clone()))
        return found.states[rank] if reader == rank else torch.cat(pieces)


def open_copies(
    world: World,
    root: Path,
    run_name: str,
    about: Mapping[str, Any],
    starts: Mapping[str, int] = NO_STARTS,
) -> NeighbourCopies:
    """Make ready to keep copies under `root`, a memory-backed folder of each host.

    All ranks call it. `about`: what a copy must say to be of this layout, its `lineage` what it
    must say to be this run's. `starts`: as of `CopyFolder`. Ranks that share the folder are one
    host.
    """
    with together(world, "opening copies in memory"):
        start: str = world.everybody.broadcast_object(uuid.uuid4().hex, root=0)
        folder = CopyFolder(root, run_name, starts)
        folder.open(start, world.rank)
        place = find_place(world, folder, start)
        return NeighbourCopies(world, folder, place, about, start)
