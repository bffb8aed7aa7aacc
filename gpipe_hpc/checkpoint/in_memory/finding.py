"""The newest copies from which all ranks can go on: agreed on by all, and whole to the bit.

A rank that finds its copy on its own host tells nobody which it is. What travels to all is which
ranks do not, and who has read theirs.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from operator import add, or_
from typing import Any, NamedTuple

import torch

from gpipe_hpc.checkpoint.in_memory.files import CopyFolder, Generation, Held, read_copy
from gpipe_hpc.checkpoint.rank_state import StateError, unpack
from gpipe_hpc.comm.world.world import World

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
    copy must say about itself; its `lineage` is what it says to be of this run in any layout.
    """
    known = [c for c in folder.all() if c.about.get("lineage") == expected.get("lineage")]
    others = [c for c in known if any(c.about.get(k) != value for k, value in expected.items())]
    held = {(copy.generation, copy.rank): copy for copy in known if copy not in others}
    given_up: set[Generation] = set()
    while generation := _newest(world, held, given_up):
        found = _found(world, folder, here, held, *generation)
        if found is None:
            given_up.add(generation[0])
        elif isinstance(found, Found):
            return found
        else:  # another host may have a whole copy of those that are damaged
            for first, rank in found:
                if first == here[0]:
                    held.pop((generation[0], rank), None)
    newest = world.everybody.merge_object(max((c.step for c in others), default=-1), max)
    if newest >= 0 and world.rank == 0:
        log.warning(
            "copies in memory, of step %d, are of another layout and only serve that one: the "
            "newest whole checkpoint is read instead",
            newest,
        )
    return None


def _newest(
    world: World, held: Mapping[tuple[Generation, int], Held], given_up: Collection[Generation]
) -> tuple[Generation, list[int]] | None:
    """Return the newest generation that is left, and the ranks that their own hosts lack."""
    rank = world.rank
    own: dict[Generation, tuple[range, ...]] = {
        generation: () if (generation, rank) in held else (range(rank, rank + 1),)
        for generation, _ in held
    }
    missing = world.everybody.merge_object(Missing(rank, rank + 1, own), Missing.then)
    left = missing.runs.keys() - given_up
    if not left:
        return None
    return max(left), [rank for run in missing.runs[max(left)] for rank in run]


def _found(
    world: World,
    folder: CopyFolder,
    here: Sequence[int],
    held: Mapping[tuple[Generation, int], Held],
    generation: Generation,
    missing: Sequence[int],
) -> Found | list[tuple[int, int]] | None:
    """Read what this rank is to read.

    Returns None on all ranks if the state of some rank is on no host. Returns the copies that
    turned out to be damaged, if any: the first rank of the host, and whose state it was.
    `missing`: the ranks whose copies their own hosts do not have; ranks of others read them, one
    after the other of the first host that can.
    """
    readers: dict[int, int] = {}
    if missing:
        has = here[0] == world.rank
        offers = {r: here[r % len(here)] for r in missing if has and (generation, r) in held}
        readers = world.everybody.merge_object(offers, lambda ahead, behind: behind | ahead)
        lacking = [str(rank) for rank in missing if rank not in readers]
        if lacking:
            if world.rank == 0:
                log.warning(
                    "copies of step %d in memory cannot be used: those of ranks %s are gone or "
                    "damaged; an older state is used",
                    generation.step,
                    ", ".join(lacking),
                )
            return None
    mine = [r for r, reader in readers.items() if reader == world.rank]
    if world.rank not in readers:
        mine.append(world.rank)
    states: dict[int, torch.Tensor] = {}
    damaged: list[tuple[int, int]] = []
    told_about: dict[int, dict[str, Any]] = {}
    for rank in mine:
        copy = held[generation, rank]
        try:
            states[rank] = _whole(copy)
        except (OSError, StateError) as error:
            log.warning("rank %d: %s: %s", world.rank, copy.path, error)
            damaged.append((here[0], rank))
        if rank == 0:
            told_about[0] = copy.about
    damaged = world.everybody.merge_object(damaged, add)
    if damaged:
        return damaged
    about = world.everybody.merge_object(told_about, or_)[0]
    return Found(generation.step, about, readers.get(world.rank, world.rank), states)


def _whole(copy: Held) -> torch.Tensor:
    memory = read_copy(copy.path)
    unpack(memory)
    return memory
