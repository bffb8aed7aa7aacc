"""Find the newest in-memory checkpoint that is complete and undamaged on all ranks.

To limit communication, ranks report only which ranks have no copy on their own host, and which rank
reads their copy instead.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from operator import add, or_
from typing import Any, NamedTuple

import torch

from gpipe_hpc.checkpoint.in_memory.files import CopyFolder, Generation, StoredCopy, read_copy
from gpipe_hpc.checkpoint.rank_state import StateError, unpack
from gpipe_hpc.comm.world.world import World

log = logging.getLogger("gpipe_hpc.train")


class CopySet(NamedTuple):
    """In-memory copies of all ranks' states at one step.

    Args:
        step: the step.
        about: the description of rank 0's state.
        reader: the rank that has read this rank's state.
        states: the states that this rank has read, by rank.
    """

    step: int
    about: dict[str, Any]
    reader: int
    states: dict[int, torch.Tensor]


class MissingCopies(NamedTuple):
    """Ranks in [first, stop) that have no copy on their own hosts, by generation.

    Ranks are stored as ranges. A generation of which no host of these ranks has a copy is left out.
    """

    first: int
    stop: int
    runs: dict[Generation, tuple[range, ...]]

    def of(self, generation: Generation) -> tuple[range, ...]:
        """Return the ranks that have no copy of a generation on their own hosts."""
        return self.runs.get(generation, (range(self.first, self.stop),))

    def merge(self, behind: "MissingCopies") -> "MissingCopies":
        """Merge with `behind`, the missing copies of the ranks that follow."""
        runs = {
            generation: _joined(self.of(generation), behind.of(generation))
            for generation in self.runs.keys() | behind.runs.keys()
        }
        return MissingCopies(self.first, behind.stop, runs)


def _joined(ahead: tuple[range, ...], behind: tuple[range, ...]) -> tuple[range, ...]:
    if ahead and behind and ahead[-1].stop == behind[0].start:
        return (*ahead[:-1], range(ahead[-1].start, behind[0].stop), *behind[1:])
    return (*ahead, *behind)


def find(
    world: World, folder: CopyFolder, here: Sequence[int], expected: Mapping[str, Any]
) -> CopySet | None:
    """Return the newest step at which an undamaged copy of every rank's state exists, or None.

    Collective; all ranks get the same step.

    Args:
        world: the ranks.
        folder: this host's copies.
        here: the ranks of this host.
        expected: the description that a copy must have; its `lineage` identifies the run in any
            layout.
    """
    known = [c for c in folder.all() if c.about.get("lineage") == expected.get("lineage")]
    others = [c for c in known if any(c.about.get(k) != value for k, value in expected.items())]
    held = {(copy.generation, copy.rank): copy for copy in known if copy not in others}
    given_up: set[Generation] = set()
    while generation := _newest(world, held, given_up):
        found = _found(world, folder, here, held, *generation)
        if found is None:
            given_up.add(generation[0])
        elif isinstance(found, CopySet):
            return found
        else:  # another host may have an undamaged copy
            for first, rank in found:
                if first == here[0]:
                    held.pop((generation[0], rank), None)
    newest = world.world_group.merge_object(max((c.step for c in others), default=-1), max)
    if newest >= 0 and world.rank == 0:
        log.warning(
            "the in-memory checkpoint of step %d has another layout and cannot be used; the "
            "newest complete checkpoint on disk is read instead",
            newest,
        )
    return None


def _newest(
    world: World,
    held: Mapping[tuple[Generation, int], StoredCopy],
    given_up: Collection[Generation],
) -> tuple[Generation, list[int]] | None:
    """Return the newest remaining generation, and the ranks whose own hosts have no copy of it."""
    rank = world.rank
    own: dict[Generation, tuple[range, ...]] = {
        generation: () if (generation, rank) in held else (range(rank, rank + 1),)
        for generation, _ in held
    }
    missing = world.world_group.merge_object(
        MissingCopies(rank, rank + 1, own), MissingCopies.merge
    )
    left = missing.runs.keys() - given_up
    if not left:
        return None
    return max(left), [rank for run in missing.runs[max(left)] for rank in run]


def _found(
    world: World,
    folder: CopyFolder,
    here: Sequence[int],
    held: Mapping[tuple[Generation, int], StoredCopy],
    generation: Generation,
    missing: Sequence[int],
) -> CopySet | list[tuple[int, int]] | None:
    """Read the copies of a generation that are assigned to this rank. Collective.

    Args:
        missing: ranks without a copy on their own host; the first other host that has a copy reads
            it, alternating between its ranks.

    Returns:
        The copies; or a list of damaged copies as (first rank of the host, rank of the state); or
            None on all ranks if no host has the state of some rank.
    """
    readers: dict[int, int] = {}
    if missing:
        has = here[0] == world.rank
        offers = {r: here[r % len(here)] for r in missing if has and (generation, r) in held}
        readers = world.world_group.merge_object(offers, lambda ahead, behind: behind | ahead)
        lacking = [str(rank) for rank in missing if rank not in readers]
        if lacking:
            if world.rank == 0:
                log.warning(
                    "the in-memory checkpoint of step %d cannot be used: the copies of ranks %s "
                    "are missing or damaged; an older state is used",
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
    damaged = world.world_group.merge_object(damaged, add)
    if damaged:
        return damaged
    about = world.world_group.merge_object(told_about, or_)[0]
    return CopySet(generation.step, about, readers.get(world.rank, world.rank), states)


def _whole(copy: StoredCopy) -> torch.Tensor:
    memory = read_copy(copy.path)
    unpack(memory)
    return memory
