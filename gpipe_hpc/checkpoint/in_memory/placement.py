"""Assignment of ranks to hosts, and of each rank's second copy to a rank of another host.

The ranks of a host find each other by files in its folder. If the ranks of each host are
consecutive, as launchers assign them, the largest number of ranks on one host determines where each
rank stores its second copy:

    hosts  a a a b b b c c     rank r stores its copy at r + 3, as no host has more than 3 ranks
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from gpipe_hpc.checkpoint.in_memory.files import CopyFolder
from gpipe_hpc.comm.collectives.group import barrier
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.host.machine import kernel_identity
from gpipe_hpc.errors import ConfigError

_TRIES: Final = 10  # attempts to find every rank in its folder


class CopyPlacement(NamedTuple):
    """The host of a rank, and the ranks with which it exchanges second copies of their states.

    Args:
        here: the ranks of its host (those that share its folder), ascending.
        num_hosts: number of hosts.
        holder: the rank that stores its second copy; itself if there is one host.
        sources: the ranks whose second copies it stores.
        is_shared: whether all ranks share one folder although they are on several machines.
    """

    here: tuple[int, ...]
    num_hosts: int
    holder: int
    sources: tuple[int, ...]
    is_shared: bool = False


class _Hosts(NamedTuple):
    """Summary of the hosts of some ranks; `longest` is the largest number of ranks on one host."""

    num_hosts: int
    longest: int
    are_rows: bool  # the ranks of each host are consecutive
    is_whole: bool  # each rank has found itself in its host's folder
    machine: str  # empty if there are several

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


def find_place(world: World, folder: CopyFolder, start: str) -> CopyPlacement:
    """Return this rank's host and the ranks with which it exchanges copies. Collective.

    All ranks have opened their folders before. Raises ConfigError if another process keeps removing
    the folder.
    """
    rank, size = world.rank, world.size
    for _ in range(_TRIES):
        barrier(world.world_group)
        here = folder.entered(start)
        hosts = world.world_group.merge_object(_own(rank, here), _Hosts.plus)
        if hosts.is_whole:
            break
        folder.open(start, rank)
    else:
        raise ConfigError(
            f"config: bad checkpoint.neighbour_dir: {folder.path} was removed {_TRIES} times "
            "while it was opened; find the process that removes it, or choose another folder"
        )
    if hosts.num_hosts == 1:
        return CopyPlacement(here, 1, rank, (), is_shared=not hosts.machine)
    if hosts.are_rows and 2 * hosts.longest <= size:
        behind, before = (rank + hosts.longest) % size, (rank - hosts.longest) % size
        return CopyPlacement(here, hosts.num_hosts, behind, (before,))
    # The ranks of a host are not consecutive, or one host has more than half: rank 0 decides.
    told = world.world_group.gather_object(here[0], root=0)
    rows = None if told is None else _rows(choose_holders(told))
    holder, sources = world.world_group.scatter_object(rows, root=0)
    return CopyPlacement(here, hosts.num_hosts, holder, tuple(sources))


def choose_holders(hosts: Sequence[Hashable]) -> list[int]:
    """Return, for each rank, the rank of another host that stores its second copy.

    Ranks are ordered by host. If the largest host has n ranks, the rank n positions further stores
    the copy, so that each rank stores one. If that host has more than half of the ranks, the other
    ranks take turns to store its copies, and its ranks store theirs. With one host, each rank
    stores its own copy.
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
    """Return, for each rank, the holder of its copy and the ranks whose copies it stores."""
    sources: list[list[int]] = [[] for _ in holders]
    for rank, holder in enumerate(holders):
        sources[holder].append(rank)
    return list(zip(holders, sources, strict=True))
