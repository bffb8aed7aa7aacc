"""In-memory checkpoints: placement of each rank's copies, and replacement of old generations.

A rank's state is stored on its own host, in case processes die, and on another host, in case the
host is lost. While the state of step N is written, an older generation (the copies of all ranks at
an earlier step) is complete; it is removed only after all ranks have written N. A kill at any
moment therefore leaves one complete generation.
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
from gpipe_hpc.checkpoint.in_memory.placement import CopyPlacement, find_place
from gpipe_hpc.checkpoint.in_memory.search import CopySet, find
from gpipe_hpc.checkpoint.rank_state import StateError, fits, pack, restore, unpack
from gpipe_hpc.comm.collectives.group import barrier
from gpipe_hpc.comm.transport.byte_moves import ByteRoute, ByteTransfers
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.errors import ConfigError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

log = logging.getLogger("gpipe_hpc.train")

_SAVING, _RESTORING = 0, 1  # serial numbers of ByteMoves
_ON_ONE_HOST: Final = (
    "checkpoint.neighbour_every: all ranks are on one host, so copies stay in its memory: they "
    "survive a killed process, but not the loss of the host"
)


def _shared(folder: CopyFolder) -> str:
    return (
        f"checkpoint.neighbour_dir: {folder.path} is on a file system shared by several machines, "
        f"not in each host's memory; each state is stored only once, as fast and as safely as "
        f"that file system allows; choose another folder for copies in memory"
    )


class NeighbourCopies:
    """The in-memory checkpoints of a run on all hosts; methods are collective unless stated."""

    def __init__(
        self,
        world: World,
        folder: CopyFolder,
        place: CopyPlacement,
        about: Mapping[str, Any],
        start: str,
    ) -> None:
        self._world = world
        self._folder = folder
        self.place = place
        self._about = dict(about)
        self.start = start  # stored in every copy that is written from here on
        self._whole: list[int] = []  # steps of which all ranks have a copy, at most two
        self._buffer = HostBuffer(world.device)
        moves = [ByteRoute(source, world.rank) for source in place.sources]
        if place.holder != world.rank:
            moves.append(ByteRoute(world.rank, place.holder))
        self._moves = ByteTransfers(world, moves, _SAVING)
        if world.rank == 0 and place.num_hosts == 1:
            log.warning(_shared(folder) if place.is_shared else _ON_ONE_HOST)

    def find(self) -> CopySet | None:
        """Find the newest complete state of this run in this layout.

        Returns None if there is none; logs the reason if there are copies.
        """
        with collective_errors(self._world, "looking for copies in memory"):
            return find(self._world, self._folder, self.place.here, self._about)

    def restore(
        self, found: CopySet, pipe: "Pipeline", optimizer: torch.optim.Optimizer
    ) -> dict[str, Any] | None:
        """Restore the state that `find` returned; return its `extra` values.

        Returns None on all ranks, without changing anything, if the state does not fit the model.
        """
        with collective_errors(self._world, "taking over copies in memory"):
            own = self._receive(found)
            try:
                state = unpack(own)
                is_good = fits(pipe, state)
            except StateError:
                is_good = False
            if not self._world.world_group.merge_object(is_good, and_):
                return None
            restore(pipe, optimizer, state)
            self._whole = [found.step]
            extra: dict[str, Any] = found.about["extra"]
            return extra

    def forget_others(self) -> None:
        """Remove the copies that this start of the run does not resume from."""
        with collective_errors(self._world, "removing old copies in memory"):
            self._folder.keep(set(self._whole))
            self._folder.clear_forgotten()
            # No rank may write before all ranks have removed old copies.
            barrier(self._world.world_group)

    def save(
        self, pipe: "Pipeline", optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]
    ) -> float:
        """Store the state after this step; return the seconds that this took.

        Raises ConfigError on all ranks if the memory of a host is too small for two generations.
        """
        began_s = time.perf_counter()
        step = pipe.steps_done
        with collective_errors(self._world, "copying to a neighbour"):
            about = {**self._about, START: self.start, "extra": dict(extra)}
            own = pack(pipe, optimizer, about, self._buffer)
            self._whole = self._whole[-1:]
            self._folder.keep(set(self._whole))
            outgoing = {} if self.place.holder == self._world.rank else {self.place.holder: own}
            sizes = self._moves.exchange_sizes(outgoing)
            failure = self._memory_shortage(len(own) + sum(sizes.values()))
            if failure is not None and not self._whole:
                raise ConfigError(failure)
            failure = failure or self._write(step, own, outgoing, sizes)
            told = None if failure is None else (self._world.rank, failure)
            first = self._world.world_group.merge_object(
                told, lambda ahead, behind: ahead or behind
            )
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
        """Remove the copies on this host; not collective."""
        self._folder.remove(self.start)

    def _write(
        self,
        step: int,
        own: torch.Tensor,
        outgoing: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
    ) -> str | None:
        """Write this rank's state and those received; return an error message or None."""
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

    def _memory_shortage(self, num_bytes: int) -> str | None:
        """Return the same error message on all ranks if a host has too little memory, else None.

        `num_bytes` is the number of bytes that this rank will write.
        """
        world, here = self._world, self.place.here
        own = self._folder.publish_need(world.rank, num_bytes)
        # Ranks of one host share the folder: none may write before all have removed old copies.
        barrier(world.world_group)
        if world.rank == here[0]:
            # The first save needs memory for two generations, later ones for one.
            needed = self._folder.needed_bytes(here) * (1 if self._whole else 2)
            free = self._folder.free_bytes()
            lacking = (
                f"config: bad checkpoint.neighbour_every: the copies need {needed / 1e6:,.1f} MB "
                f"in {self._folder.path} on {socket.gethostname()}, but only "
                f"{free / 1e6:,.1f} MB are free; set checkpoint.neighbour_dir to a larger "
                f"memory-backed folder, or checkpoint.neighbour_every=0"
            )
            own = lacking if free < needed else own
        return world.world_group.merge_object(own, lambda ahead, behind: ahead or behind)

    def _receive(self, found: CopySet) -> torch.Tensor:
        """Return this rank's state, sent by the rank that has read it from a file."""
        rank, reader = self._world.rank, found.reader
        outgoing = {r: state for r, state in found.states.items() if r != rank}
        moves = [ByteRoute(rank, r) for r in outgoing]
        if reader != rank:
            moves.append(ByteRoute(reader, rank))
        by_bytes = ByteTransfers(self._world, moves, _RESTORING)
        sizes = by_bytes.exchange_sizes(outgoing)
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
    """Open the in-memory checkpoints of a run. Collective.

    Args:
        world: the ranks.
        root: a memory-backed folder of each host; ranks that share it are treated as one host.
        run_name: name of the run's folder below `root`.
        about: the description that a copy of this layout must have; its `lineage` identifies the
            run.
        starts: see `CopyFolder`.
    """
    with collective_errors(world, "opening copies in memory"):
        start: str = world.world_group.broadcast_object(uuid.uuid4().hex, root=0)
        folder = CopyFolder(root, run_name, starts)
        folder.open(start, world.rank)
        place = find_place(world, folder, start)
        return NeighbourCopies(world, folder, place, about, start)
