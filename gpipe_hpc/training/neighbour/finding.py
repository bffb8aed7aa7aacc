"""The newest copies from which all ranks can go on: agreed on by all, and whole to the bit."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gpipe_hpc.checkpoint.rank_state import StateError, unpack
from gpipe_hpc.comm.world import World
from gpipe_hpc.training.neighbour.files import CopyFolder, Generation, Held, read_copy

log = logging.getLogger("gpipe_hpc.train")


class Found(NamedTuple):
    """Copies of all ranks' states at one step.

    `readers`: by rank, who has read its state. `states`: what this rank has read, by rank.
    `about`: what rank 0 said of its state.
    """

    step: int
    about: dict[str, Any]
    readers: tuple[int, ...]
    states: dict[int, torch.Tensor]


def find(
    world: World, folder: CopyFolder, hosts: Sequence[str], expected: Mapping[str, Any]
) -> Found | None:
    """Return the newest step of which every rank's state is on some host and whole, or None.

    All ranks call it, and get the same step. `hosts`: by rank. `expected`: what a copy must say
    about itself.
    """
    leads_host = hosts.index(hosts[world.rank]) == world.rank
    held = [
        copy
        for copy in (folder.all() if leads_host else [])
        if all(copy.about.get(key) == value for key, value in expected.items())
    ]
    told = world.everybody.all_gather_object([(copy.rank, *copy.generation) for copy in held])
    # By generation and rank: the first rank of a host that has its copy.
    places: dict[Generation, dict[int, int]] = {}
    for first, part in enumerate(told):
        for rank, *generation in part:
            # Its own host's copy, if there is one: nothing has to travel then.
            known = places.setdefault(Generation(*generation), {})
            if rank not in known or hosts[first] == hosts[rank]:
                known[rank] = first
    for generation in sorted(places, reverse=True):
        if places[generation].keys() != set(range(world.size)):
            continue
        readers = _readers(places[generation], hosts)
        found = _read(world, folder, generation, readers)
        if found is not None:
            return found
        log.warning("copies of step %d in memory are damaged; looking for others", generation.step)
    return None


def _readers(places: Mapping[int, int], hosts: Sequence[str]) -> tuple[int, ...]:
    """Return who reads each rank's state: itself, or one after the other of a host that has it."""
    readers = []
    for rank in range(len(hosts)):
        host = hosts[places[rank]]
        there = [other for other, its in enumerate(hosts) if its == host]
        readers.append(rank if hosts[rank] == host else there[rank % len(there)])
    return tuple(readers)


def _read(
    world: World, folder: CopyFolder, generation: Generation, readers: tuple[int, ...]
) -> Found | None:
    """Read what this rank is to read; None on all ranks if something on one is not whole."""
    mine = {rank for rank, reader in enumerate(readers) if reader == world.rank}
    states: dict[int, torch.Tensor] = {}
    about: dict[str, Any] | None = None
    failure: str | None = None
    for copy in folder.all():
        if copy.generation != generation or copy.rank not in mine:
            continue
        try:
            states[copy.rank] = _whole(copy)
        except (OSError, StateError) as error:
            failure = f"{copy.path}: {error}"
        if copy.rank == 0:
            about = copy.about
    if failure is None and states.keys() != mine:
        failure = f"{folder.path}: a copy has gone"
    told = world.everybody.all_gather_object((failure, about))
    for rank, (text, _) in enumerate(told):
        if text is not None:
            log.warning("rank %d: %s", rank, text)
            return None
    (told_about,) = [part for _, part in told if part is not None]
    return Found(generation.step, told_about, readers, states)


def _whole(copy: Held) -> torch.Tensor:
    memory = read_copy(copy.path)
    unpack(memory)
    return memory
