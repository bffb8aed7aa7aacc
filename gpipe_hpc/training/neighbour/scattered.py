"""Copies of another layout's states that together hold all that a checkpoint would.

Where hosts are lost, or have come, no rank has the state that it needs in one piece. But copies
that are left may hold every stage between them. Some ranks read them; then each is sent the
tensors that it holds in the layout of now.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

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

T = TypeVar("T")

MEMORY: Final = Path("in memory")
_GATHERING: Final = 2  # serial of byte moves
_ROUND_BYTES: Final = 2**28


class _Told(NamedTuple):
    """What the first rank of a host says of a copy there: whose it is, and which stages it has."""

    step: int
    start: str
    ranks: int
    rank: int
    stages: tuple[int, ...]
    num_stages: int
    is_alone: bool


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

    def fetch(self, names: Sequence[str]) -> None:
        """Bring tensors to this rank, by parts; all ranks call it, each with its own names."""
        world = self._world
        order = list(self._places)
        number = {name: index for index, name in enumerate(order)}
        wanted: list[list[int]] = world.everybody.all_gather_object([number[n] for n in names])
        reader = [place.reader for place in self._places.values()]
        moves = sorted(
            {
                Move(reader[index], rank)
                for rank, indices in enumerate(wanted)
                for index in indices
                if reader[index] != rank
            }
        )
        by_bytes = ByteMoves(world, moves, _GATHERING)
        own = set(wanted[world.rank])
        sources = [move.source for move in moves if move.destination == world.rank]
        targets = [move.destination for move in moves if move.source == world.rank]
        self._here = {n: self._own[n] for n in names if self._places[n].reader == world.rank}
        for turn in self._rounds(order):
            # Each list of one pair is in the same order on both ends.
            going = {
                rank: self._packed(
                    [order[index] for index in sorted(turn.intersection(wanted[rank]))]
                )
                for rank in targets
            }
            coming = {
                source: [order[index] for index in sorted(turn & own) if reader[index] == source]
                for source in sources
            }
            inbox = _Inbox({source: self._size(each) for source, each in coming.items()})
            by_bytes.run(going, inbox.sizes, inbox.take)
            for source, each in coming.items():
                self._unpack(inbox.memory[source], each)
        self._own = {}

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

    def _packed(self, names: Sequence[str]) -> Tensor:
        """Return the bytes of those of the tensors that this rank has read, one after another."""
        parts = [
            self._own[name].contiguous().reshape(-1).view(torch.uint8)
            for name in names
            if self._places[name].reader == self._world.rank
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def _unpack(self, memory: Tensor, names: Sequence[str]) -> None:
        start = 0
        for name in names:
            place = self._places[name]
            raw = memory[start : start + place.nbytes].clone()  # its start may be anywhere
            self._here[name] = raw.view(_dtype(place.dtype)).view(place.shape)
            start += place.nbytes


def find_scattered(
    world: World, folder: CopyFolder, hosts: Sequence[str], lineage: object, after: int
) -> Scattered | str | None:
    """Return the newest state behind a step that copies hold together, whatever the layout was.

    All ranks call it, and get the same: a state, why there is none, or None where there are no
    copies of this history at all. `hosts`: by rank. `after`: the step.
    """
    first_here = hosts.index(hosts[world.rank])
    held: list[Held] = []
    if first_here == world.rank:
        held = [copy for copy in folder.all() if copy.about.get("lineage") == lineage]
    told: list[list[_Told]] = [
        [_Told(*each) for each in part]
        for part in world.everybody.all_gather_object([tuple(_told(copy)) for copy in held])
    ]
    # For each generation the hosts of every rank's copy, by the first rank there.
    generations: dict[Generation, dict[int, list[tuple[int, _Told]]]] = {}
    for first, part in enumerate(told):
        for each in (one for one in part if one.step > after):
            of_rank = generations.setdefault(Generation(each.step, each.start), {})
            of_rank.setdefault(each.rank, []).append((first, each))
    why: str | None = None
    for generation in sorted(generations, reverse=True):
        copies = generations[generation]
        while True:
            chosen = _choose(copies)
            if isinstance(chosen, str):
                why = why or f"copies of step {generation.step} in memory {chosen}"
                break
            found, failed = _read(world, folder, hosts, generation, chosen)
            if found is not None:
                return found
            # Others may have what was in those that are damaged.
            for rank, first in failed:
                copies[rank] = [each for each in copies[rank] if each[0] != first]
    return why


def _told(copy: Held) -> _Told:
    about = copy.about
    return _Told(
        *copy.generation,
        int(about.get("ranks", 0)),
        copy.rank,
        tuple(about.get(STAGES_HELD, ())),
        int(about.get(NUM_STAGES, 0)),
        bool(about.get(ALONE)),
    )


def _choose(copies: Mapping[int, Sequence[tuple[int, _Told]]]) -> dict[int, int] | str:
    """Return which ranks' copies to read, each with the host's first rank; or what they lack.

    Of a stage that several ranks held the first one's is taken, as a checkpoint does.
    """
    chosen: dict[int, int] = {}
    stages: set[int] = set()
    num_stages, ranks = 0, 0
    for rank in sorted(copies):
        for first, each in copies[rank][:1]:
            if not each.is_alone:
                return (
                    "are of replicas that train apart or share the optimizer's state, which only "
                    "as many ranks in the same layout can take"
                )
            num_stages, ranks = each.num_stages, each.ranks
            if not stages.issuperset(each.stages):
                chosen[rank] = first
                stages.update(each.stages)
    lacking = sorted(set(range(num_stages)) - stages)
    if lacking or not chosen:
        lost = sorted(set(range(ranks)) - {rank for rank in copies if copies[rank]})
        which = f"stage{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
        return f"lack {which}: those of ranks {', '.join(map(str, lost))} are gone or damaged"
    return chosen


def _read(
    world: World,
    folder: CopyFolder,
    hosts: Sequence[str],
    generation: Generation,
    chosen: Mapping[int, int],
) -> tuple[Scattered | None, list[tuple[int, int]]]:
    """Read the chosen copies, shared out over the ranks of their hosts; return also what failed."""
    readers: dict[int, int] = {}
    for turn, (rank, first) in enumerate(sorted(chosen.items())):
        there = [other for other, host in enumerate(hosts) if host == hosts[first]]
        readers[rank] = there[turn % len(there)]
    states: dict[int, StoredState] = {}
    failed: list[tuple[int, int]] = []
    mine = [rank for rank, reader in readers.items() if reader == world.rank]
    there_is = folder.all() if mine else []
    files = {copy.rank: copy for copy in there_is if copy.generation == generation}
    for rank in mine:
        try:
            states[rank] = unpack(read_copy(files[rank].path))
        except (KeyError, OSError, StateError):
            failed.append((rank, chosen[rank]))
    lost = _gathered(world, failed)
    if lost:
        return None, lost
    own: dict[str, Tensor] = {}
    for rank in sorted(states, reverse=True):
        own |= states[rank].tensors
    listed = [
        (rank, [(name, tuple(t.shape), str(t.dtype)) for name, t in state.tensors.items()])
        for rank, state in states.items()
    ]
    places: dict[str, _Place] = {}
    for rank, tensors in sorted(_gathered(world, listed)):
        for name, shape, dtype in tensors:
            places.setdefault(name, _Place(readers[rank], tuple(shape), dtype))
    headers = _gathered(world, [(rank, state.about) for rank, state in states.items()])
    facts = together([StoredState(about, {}) for _, about in sorted(headers, key=lambda h: h[0])])
    return Scattered(world, facts, places, own), []


def _gathered(world: World, own: list[T]) -> list[T]:
    """Return what all ranks have, in their order."""
    parts: list[list[T]] = world.everybody.all_gather_object(own)
    return [each for part in parts for each in part]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype), f"{name} is the name of a dtype"
    return found
