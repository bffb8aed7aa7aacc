"""The newest copies from which all ranks can go on: agreed on by all, and whole to the bit.

A rank that finds its copy on its own host tells nobody which it is. What travels to all is which
ranks do not, and who has read theirs.
"""

import logging
from collections.abc import Mapping, Sequence
from operator import or_
from typing import Any, NamedTuple

import torch

from gpipe_hpc.checkpoint.rank_state import StateError, unpack
from gpipe_hpc.comm.world import World
from gpipe_hpc.training.neighbour.files import CopyFolder, Generation, Held, read_copy

log = logging.getLogger("gpipe_hpc.train")


class Found(NamedTuple):
    """Copies of all ranks' states at one step.

    `reader`: who has read this rank's state. `states`: what this rank has read, by rank.
    `about`: what rank 0 said of its state.
    """

    step: int
    about: dict[str, Any]
    reader: int
    states: dict[int, torch.Tensor]


class Missing(NamedTuple):
    """Of the ranks from `first` to before `stop`: whose copies their own hosts do not have.

    By generation, as runs of ranks; a generation of which no host of these ranks has anything is
    left out.
    """

    first: int
    stop: int
    runs: dict[Generation, tuple[range, ...]]

    def of(self, generation: Generation) -> tuple[range, ...]:
        """Return whose copies of a generation are missing."""
        return self.runs.get(generation, (range(self.first, self.stop),))

    def then(self, behind: "Missing") -> "Missing":
        """Return what is missing of these ranks and of those behind them."""
        runs = {
            generation: _joined(self.of(generation), behind.of(generation))
            for generation in self.runs.keys() | behind.runs.keys()
        }
        return Missing(self.first, behind.stop, runs)


def _joined(ahead: tuple[range, ...], behind: tuple[range, ...]) -> tuple[range, ...]:
    if ahead and behind and ahead[-1].stop == behind[0].start:
        return (*ahead[:-1], range(ahead[-1].start, behind[0].stop), *behind[1:])
    return (*ahead, *behind)


def find(
    world: World, folder: CopyFolder, here: Sequence[int], expected: Mapping[str, Any]
) -> Found | None:
    """Return the newest step of which every rank's state is on some host and whole, or None.

    All ranks call it, and get the same step. `here`: the ranks of this host. `expected`: what a
    copy must say about itself.
    """
    held = {
        (copy.generation, copy.rank): copy
        for copy in folder.all()
        if all(copy.about.get(key) == value for key, value in expected.items())
    }
    rank = world.rank
    own: dict[Generation, tuple[range, ...]] = {
        generation: () if (generation, rank) in held else (range(rank, rank + 1),)
        for generation, _ in held
    }
    missing = world.everybody.merge_object(Missing(rank, rank + 1, own), Missing.then)
    for generation in sorted(missing.runs, reverse=True):
        runs = missing.runs[generation]
        missing_ranks = [rank for run in runs for rank in run]
        found = _found(world, folder, here, held, generation, missing_ranks)
        if found is not None:
            return found
    return None


def _found(
    world: World,
    folder: CopyFolder,
    here: Sequence[int],
    held: Mapping[tuple[Generation, int], Held],
    generation: Generation,
    missing: Sequence[int],
) -> Found | None:
    """Read what this rank is to read; None on all ranks if something is nowhere, or not whole.

    `missing`: the ranks whose copies their own hosts do not have; ranks of others read them, one
    after the other of the first host that can.
    """
    readers: dict[int, int] = {}
    if missing:
        has = here[0] == world.rank
        offers = {r: here[r % len(here)] for r in missing if has and (generation, r) in held}
        readers = world.everybody.merge_object(offers, lambda ahead, behind: behind | ahead)
        if len(readers) < len(missing):
            return None
    mine = [r for r, reader in readers.items() if reader == world.rank]
    if world.rank not in readers:
        mine.append(world.rank)
    states: dict[int, torch.Tensor] = {}
    failures: dict[int, str] = {}
    told_about: dict[int, dict[str, Any]] = {}
    for rank in mine:
        copy = held.get((generation, rank))
        try:
            states[rank] = _whole(copy)
        except (OSError, StateError) as error:
            where = folder.path if copy is None else copy.path
            failures = {world.rank: f"{where}: {error}"}
        if rank == 0 and copy is not None:
            told_about[0] = copy.about
    failures = world.everybody.merge_object(failures, _first)
    for rank, text in failures.items():
        log.warning("rank %d: %s", rank, text)
        log.warning("copies of step %d in memory are damaged; looking for others", generation.step)
        return None
    about = world.everybody.merge_object(told_about, or_)[0]
    return Found(generation.step, about, readers.get(world.rank, world.rank), states)


def _first(ahead: dict[int, str], behind: dict[int, str]) -> dict[int, str]:
    return ahead or behind


def _whole(copy: Held | None) -> torch.Tensor:
    if copy is None:
        raise StateError("a copy has gone")
    memory = read_copy(copy.path)
    unpack(memory)
    return memory
