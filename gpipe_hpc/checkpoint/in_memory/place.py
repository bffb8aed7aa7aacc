"""Who shares a host, and which rank of another host keeps whose second copy.

The ranks of a host find one another in its folder. Of all ranks each learns three numbers; where
those of a host follow one another, as launchers put them, it knows its own part by these:

    hosts  a a a b b b c c     rank r keeps its copy at r + 3, as no host has more than 3 ranks
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.checkpoint.in_memory.files import CopyFolder
from gpipe_hpc.comm.collectives.group import meet
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.host.machine import kernel_identity
from gpipe_hpc.errors import ConfigError

_TRIES: Final = 10  # to find every rank in its folder


class Place(NamedTuple):
    """Where a rank stands among the hosts.

    `here`: the ranks of its host, ascending: those that share its folder. `holder`: who keeps its
    second copy; itself, where there is one host. `sources`: whose second copies it keeps.
    `is_shared`: all ranks share one folder, though they are on several machines.
    """

    here: tuple[int, ...]
    num_hosts: int
    holder: int
    sources: tuple[int, ...]
    is_shared: bool = False


class _Hosts(NamedTuple):
    """What is known of the hosts of some ranks: `longest` is the most ranks of one."""

    num_hosts: int
    longest: int
    are_rows: bool  # the ranks of each host follow one another
    is_whole: bool  # each rank has found itself in its host's folder
    machine: str  # empty where there are several

    def plus(self, other: "_Hosts") -> "_Hosts":
        longest = max(self.longest, other.longest)
        are_rows, is_whole = self.are_rows and other.are_rows, self.is_whole and other.is_whole
        machine = self.machine if self.machine == other.machine else ""
        return _Hosts(self.num_hosts + other.num_hosts, longest, are_rows, is_whole, machine)


def _own(rank: int, here: Sequence[int]) -> _Hosts:
    if rank not in here:
        return _Hosts(0, 0, are_rows=False, is_whole=False, machine="")
    is_row = tuple(here) == tuple(range(here[0], here[0] + len(here)))
    return _Hosts(int(here[0] == rank), len(here), is_row, True, kernel_identity())


def find_place(world: World, folder: CopyFolder, start: str) -> Place:
    """Return this rank's place; all ranks call it, having opened their folders at this start.

    Raises ConfigError where something removes a folder again and again.
    """
    rank, size = world.rank, world.size
    for _ in range(_TRIES):
        meet(world.everybody)
        here = folder.entered(start)
        hosts = world.everybody.merge_object(_own(rank, here), _Hosts.plus)
        if hosts.is_whole:
            break
        folder.open(start, rank)
    else:
        raise ConfigError(
            f"config: bad checkpoint.neighbour_dir: {folder.path} was removed {_TRIES} times "
            "while it was opened; find out what removes it, or choose another folder"
        )
    if hosts.num_hosts == 1:
        return Place(here, 1, rank, (), is_shared=not hosts.machine)
    if hosts.are_rows and 2 * hosts.longest <= size:
        behind, before = (rank + hosts.longest) % size, (rank - hosts.longest) % size
        return Place(here, hosts.num_hosts, behind, (before,))
    # Ranks are spread in another way, or one host has more than half: rank 0 looks at all.
    told = world.everybody.gather_object(here[0], root=0)
    rows = None if told is None else _rows(choose_holders(told))
    holder, sources = world.everybody.deal_object(rows, root=0)
    return Place(here, hosts.num_hosts, holder, tuple(sources))


def choose_holders(hosts: Sequence[Hashable]) -> list[int]:
    """Return, for each rank, who keeps a second copy of its state: a rank of another host.

    With the ranks in the order of their hosts it is the one as many places on as the largest host
    has ranks, so each keeps one copy. Where that host has more than half of the ranks, the others
    take turns for its, and its ranks keep those of the others. With one host a rank keeps its own.
    """
    counts = Counter(hosts)
    if len(counts) == 1:
        return list(range(len(hosts)))
    largest, most = counts.most_common(1)[0]
    holders = [0] * len(hosts)
    if 2 * most <= len(hosts):
        numbers = {host: number for number, host in enumerate(counts)}
        order = sorted(range(len(hosts)), key=lambda r: (numbers[hosts[r]], r))
        for position, rank in enumerate(order):
            holders[rank] = order[(position + most) % len(order)]
        return holders
    inside = [rank for rank, host in enumerate(hosts) if host == largest]
    others = [rank for rank, host in enumerate(hosts) if host != largest]
    for number, rank in enumerate(inside):
        holders[rank] = others[number % len(others)]
    for rank, holder in zip(others, inside, strict=False):
        holders[rank] = holder
    return holders


def _rows(holders: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return for each rank who keeps its copy, and whose it keeps."""
    sources: list[list[int]] = [[] for _ in holders]
    for rank, holder in enumerate(holders):
        sources[holder].append(rank)
    return list(zip(holders, sources, strict=True))
