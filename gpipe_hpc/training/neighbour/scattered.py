"""Copies of another layout's states that together hold all that a checkpoint would.

Where hosts are lost, or have come, no rank has the state that it needs in one piece. But copies
that are left may hold every stage between them. Some ranks read them; then each is sent the
tensors that it holds in the layout of now.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import add, itemgetter, or_
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.checkpoint import StoredTensor
from gpipe_hpc.checkpoint.rank_state import (
    ALONE,
    NUM_STAGES,
    STAGES_HELD,
    StateError,
    StoredState,
    together,
    unpack,
)
from gpipe_hpc.comm.byte_moves import ByteMoves, Move
from gpipe_hpc.comm.world import World
from gpipe_hpc.training.neighbour.files import CopyFolder, Generation, Held, read_copy

MEMORY: Final = Path("in memory")
_GATHERING: Final = 2  # serial of byte moves
_ROUND_BYTES: Final = 2**28


class _Copy(NamedTuple):
    """A copy on some host: whose state it is, and the first rank of that host."""

    rank: int
    first: int


class _Stages(NamedTuple):
    """What copies of one generation hold between them: of each stage that with the lowest rank.

    `ranks`, `num_stages`: of the layout that wrote them.
    """

    ranks: int
    num_stages: int
    are_alone: bool
    copies: dict[int, _Copy]

    def plus(self, other: "_Stages") -> "_Stages":
        """Return what both hold."""
        both = dict(self.copies)
        for stage, copy in other.copies.items():
            both[stage] = min(both.get(stage, copy), copy)
        are_alone = self.are_alone and other.are_alone
        return _Stages(self.ranks, self.num_stages, are_alone, both)


_Generations = dict[Generation, _Stages]


class _Place(NamedTuple):
    """Where a tensor is: the rank that has read it, and what it is."""

    reader: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return math.prod(self.shape) * _dtype(self.dtype).itemsize


class _Inbox:
    """Memory for what comes from each rank, by its size, filled from the start."""

    def __init__(self, sizes: Mapping[int, int]) -> None:
        self.sizes = dict(sizes)
        self.memory = {r: torch.empty(size, dtype=torch.uint8) for r, size in sizes.items()}
        self._filled = dict.fromkeys(sizes, 0)

    def take(self, source: int, piece: Tensor) -> None:
        """Keep a piece behind those before it."""
        start = self._filled[source]
        self.memory[source][start : start + len(piece)] = piece
        self._filled[source] = start + len(piece)


class _Hop(NamedTuple):
    """What a rank takes from others, and gives to others, at one depth of all trees.

    Numbers of tensors, as runs, by rank.
    """

    coming: dict[int, list[range]]
    going: dict[int, list[range]]


class Scattered:
    """All tensors of a step's state, read by some ranks and to be sent to those that need them.

    A source of `load`. `about`: what was kept beside the state, as in a checkpoint's manifest.
    """

    def __init__(
        self,
        world: World,
        facts: Mapping[str, Any],
        places: Mapping[str, _Place],
        own: Mapping[str, Tensor],
    ) -> None:
        self.path = MEMORY
        self.facts = dict(facts)
        self.stored = {
            name: StoredTensor(
                torch.Size(place.shape), _dtype(place.dtype), "", 0, max(1, place.nbytes)
            )
            for name, place in places.items()
        }
        self._world = world
        self._places = dict(places)
        self._own = dict(own)
        self._here: dict[str, Tensor] = {}

    @property
    def step(self) -> int:
        """Return after how many steps the state was."""
        return int(self.facts["steps_done"])

    @property
    def about(self) -> dict[str, Any]:
        """Return what the writers said of it."""
        return self.facts

    def check(self, name: str) -> None:
        """Do nothing: the digest of all bytes was checked."""

    def fetch(self, names: Sequence[str]) -> None:
        """Bring tensors to this rank, by parts; all ranks call it, each with its own names."""
        world, order = self._world, list(self._places)
        number = {name: index for index, name in enumerate(order)}
        hops = self._hops([number[name] for name in names])
        sources = {source for hop in hops for source in hop.coming}
        targets = {target for hop in hops for target in hop.going}
        moves = [Move(source, world.rank) for source in sorted(sources)]
        moves += [Move(world.rank, target) for target in sorted(targets)]
        by_bytes = ByteMoves(world, moves, _GATHERING)
        self._here = {n: self._own[n] for n in names if self._places[n].reader == world.rank}
        for turn in self._rounds(order):
            for hop in hops:
                # Each list of one pair is in the same order on both ends.
                going = self._packed(
                    {rank: _names(order, turn, runs) for rank, runs in hop.going.items()}
                )
                coming = {rank: _names(order, turn, runs) for rank, runs in hop.coming.items()}
                inbox = _Inbox({source: self._size(each) for source, each in coming.items()})
                by_bytes.run(going, inbox.sizes, inbox.take)
                for source, each in coming.items():
                    self._unpack(inbox.memory[source], each)
        self._own = {}

    def _hops(self, wanted: Sequence[int]) -> list[_Hop]:
        """Return what this rank takes and passes on, as rank 0 has found; all ranks call it.

        `wanted`: the numbers of its tensors. Rank 0 alone hears what all want.
        """
        everybody = self._world.everybody
        told = everybody.gather_object(_runs(wanted), root=0)
        rows: list[list[_Hop]] | None = None
        if told is not None:
            rows = deal_hops([place.reader for place in self._places.values()], told)
        own: list[_Hop] = everybody.deal_object(rows, root=0)
        return own

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy tensors that were fetched into `targets`, by name."""
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self._here[name])

    def _rounds(self, order: Sequence[str]) -> Iterator[set[int]]:
        """Yield the tensors' numbers in groups that take no more than some memory, if they can."""
        group: set[int] = set()
        room = _ROUND_BYTES
        for index, name in enumerate(order):
            group.add(index)
            room -= self._places[name].nbytes
            if room <= 0:
                yield group
                group, room = set(), _ROUND_BYTES
        yield group

    def _size(self, names: Sequence[str]) -> int:
        return sum(self._places[name].nbytes for name in names)

    def _packed(self, names: Mapping[int, Sequence[str]]) -> dict[int, Tensor]:
        """Return the bytes of tensors for each rank, one behind another; one memory for equal."""
        memories: dict[tuple[str, ...], Tensor] = {}
        for each in map(tuple, names.values()):
            if each not in memories:
                tensors = [self._own[n] if n in self._own else self._here[n] for n in each]
                parts = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
                memories[each] = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
        return {rank: memories[tuple(each)] for rank, each in names.items()}

    def _unpack(self, memory: Tensor, names: Sequence[str]) -> None:
        start = 0
        for name in names:
            place = self._places[name]
            raw = memory[start : start + place.nbytes].clone()  # its start may be anywhere
            self._here[name] = raw.view(_dtype(place.dtype)).view(place.shape)
            start += place.nbytes


def find_scattered(
    world: World, folder: CopyFolder, here: Sequence[int], lineage: object, after: int
) -> Scattered | str | None:
    """Return the newest state behind a step that copies hold together, whatever the layout was.

    All ranks call it, and get the same: a state, why there is none, or None where there are no
    copies of this history at all. `here`: the ranks of this host. `after`: the step. What travels
    to all grows with the stages, not with the ranks.
    """
    held: list[Held] = []
    if here[0] == world.rank:
        known = (copy for copy in folder.all() if copy.about.get("lineage") == lineage)
        held = [copy for copy in known if copy.step > after]
    why: str | None = None
    generations: set[Generation] | None = None
    damaged: set[tuple[Generation, _Copy]] = set()
    while generations is None or generations:
        found_by = world.everybody.merge_object(_told(held, here[0], damaged), _merged)
        if generations is None:
            generations = set(found_by)
        if not generations:
            break
        generation = max(generations)
        chosen = _choose(world, held, generation, found_by.get(generation), damaged)
        if isinstance(chosen, str):
            why = why or f"copies of step {generation.step} in memory {chosen}"
            generations.discard(generation)
            continue
        found, failed = _read(world, folder, here, generation, chosen)
        if found is not None:
            return found
        # Others may have what was in those that are damaged.
        damaged.update((generation, copy) for copy in failed)
    return why


def _told(held: Sequence[Held], first: int, damaged: set[tuple[Generation, _Copy]]) -> _Generations:
    """Return what the copies of one host hold, without those that are damaged."""
    told: _Generations = {}
    for held_copy in held:
        about, copy = held_copy.about, _Copy(held_copy.rank, first)
        if (held_copy.generation, copy) in damaged:
            continue
        own = _Stages(
            int(about.get("ranks", 0)),
            int(about.get(NUM_STAGES, 0)),
            bool(about.get(ALONE)),
            dict.fromkeys(about.get(STAGES_HELD, ()), copy),
        )
        told = _merged(told, {held_copy.generation: own})
    return told


def _merged(ahead: _Generations, behind: _Generations) -> _Generations:
    both = dict(ahead)
    for generation, stages in behind.items():
        both[generation] = both[generation].plus(stages) if generation in both else stages
    return both


def _choose(
    world: World,
    held: Sequence[Held],
    generation: Generation,
    stages: _Stages | None,
    damaged: set[tuple[Generation, _Copy]],
) -> list[_Copy] | str:
    """Return which copies to read, by rank; or what they lack.

    Of a stage that several ranks held the first one's is taken, as a checkpoint does. All ranks
    call it.
    """
    if stages is not None and not stages.are_alone:
        return (
            "are of replicas that train apart or share the optimizer's state, which only "
            "as many ranks in the same layout can take"
        )
    if stages is None:
        return "are all damaged"
    copies = stages.copies
    lacking = sorted(set(range(stages.num_stages)) - copies.keys())
    if not lacking and copies:
        return sorted(set(copies.values()))
    here = {copy.rank for copy in held if copy.generation == generation}
    here -= {copy.rank for its, copy in damaged if its == generation}
    left = world.everybody.merge_object(here, or_)
    lost = sorted(set(range(stages.ranks)) - left)
    which = f"stage{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
    return f"lack {which}: those of ranks {', '.join(map(str, lost))} are gone or damaged"


def _read(
    world: World,
    folder: CopyFolder,
    here: Sequence[int],
    generation: Generation,
    chosen: Sequence[_Copy],
) -> tuple[Scattered | None, list[_Copy]]:
    """Read the chosen copies, shared out over the ranks of their hosts; return also what failed."""
    mine = [
        copy
        for turn, copy in enumerate(chosen)
        if copy.first == here[0] and here[turn % len(here)] == world.rank
    ]
    states: dict[int, StoredState] = {}
    failed: list[_Copy] = []
    there_is = folder.all() if mine else []
    files = {copy.rank: copy for copy in there_is if copy.generation == generation}
    for copy in mine:
        try:
            states[copy.rank] = unpack(read_copy(files[copy.rank].path))
        except (KeyError, OSError, StateError):
            failed.append(copy)
    lost = world.everybody.merge_object(failed, add)
    if lost:
        return None, lost
    own: dict[str, Tensor] = {}
    for rank in sorted(states, reverse=True):
        own |= states[rank].tensors
    listed = [
        (rank, world.rank, [(n, tuple(t.shape), str(t.dtype)) for n, t in state.tensors.items()])
        for rank, state in states.items()
    ]
    places: dict[str, _Place] = {}
    for _, reader, tensors in sorted(world.everybody.merge_object(listed, add)):
        for name, shape, dtype in tensors:
            places.setdefault(name, _Place(reader, tuple(shape), dtype))
    own_headers = [(rank, state.about) for rank, state in states.items()]
    headers = sorted(world.everybody.merge_object(own_headers, add), key=itemgetter(0))
    facts = together([StoredState(about, {}) for _, about in headers])
    return Scattered(world, facts, places, own), []


def _runs(numbers: Collection[int]) -> list[range]:
    """Return numbers as runs that follow one another."""
    runs: list[range] = []
    for number in sorted(numbers):
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def deal_hops(reader: Sequence[int], wanted: Sequence[Sequence[range]]) -> list[list[_Hop]]:
    """Return for each rank what it takes from whom, and gives to whom, one depth after another.

    `reader`: who has read each tensor. `wanted`: by rank, the tensors' numbers. Those that want the
    same of one reader, as the copies of a stage do, pass it on along a tree, in which each gives to
    two: so what a rank sends does not grow with them.

        reader -> a, b    a -> c, d    b -> e, f
    """
    lines: dict[tuple[int, tuple[range, ...]], list[int]] = {}
    for rank, runs in enumerate(wanted):
        parts: dict[int, list[range]] = {}
        for run in runs:
            for source, part in groupby(run, key=reader.__getitem__):
                parts.setdefault(source, []).extend(_runs(list(part)))
        for source, its in parts.items():
            if source != rank:
                lines.setdefault((source, tuple(its)), [source]).append(rank)
    hops: list[dict[int, _Hop]] = [{} for _ in wanted]
    for (_, runs_of_all), ranks in lines.items():
        for place in range(1, len(ranks)):
            depth, (giver, taker) = (
                (place + 1).bit_length(),
                (ranks[(place - 1) // 2], ranks[place]),
            )
            hops[giver].setdefault(depth, _Hop({}, {})).going.setdefault(taker, []).extend(
                runs_of_all
            )
            hops[taker].setdefault(depth, _Hop({}, {})).coming.setdefault(giver, []).extend(
                runs_of_all
            )
    return [[own[depth] for depth in sorted(own)] for own in hops]


def _names(order: Sequence[str], turn: set[int], runs: Sequence[range]) -> list[str]:
    """Return the names of those of some tensors that a turn has, in their order."""
    return [order[index] for index in sorted(turn.intersection(set().union(*runs)))]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype), f"{name} is the name of a dtype"
    return found
