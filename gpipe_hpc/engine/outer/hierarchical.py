"""Sums over the copies of a stage inside hosts first, then between them."""

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Final

import torch

from gpipe_hpc.comm.collectives.menu import start_hierarchical_all_reduce
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.comm.host.machine import shared_identity
from gpipe_hpc.engine.outer.items import Item

_HOST_BYTES: Final = 8  # of what stands for a host


class Hierarchical:
    """Sums inside each host first, then between hosts; `hosts`: that of each copy."""

    def __init__(self, group: Group, hosts: Sequence[Hashable]) -> None:
        self._group, self._hosts = group, hosts

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing over the group, in place."""
        return start_hierarchical_all_reduce(self._group, flat, self._hosts)


def hierarchical(group: Group, hierarchy: str | int) -> Hierarchical:
    """Return the sum inside hosts first, then between them; the same call on all copies.

    `hierarchy`: ``host``, or how many copies that follow one another count as one host: a divisor
    of their number.
    """
    if isinstance(hierarchy, int):
        return Hierarchical(group, [i // hierarchy for i in range(group.size)])
    # Who shares a network interface with nobody is a host of his own.
    own = shared_identity("net") or f"position {group.position}"
    host = blake2b(own.encode(), digest_size=_HOST_BYTES).hexdigest()
    runs = group.merge_object([(host, 1)], _in_a_row)
    return Hierarchical(group, [host for host, count in runs for _ in range(count)])


_Runs = list[tuple[str, int]]
"""Hosts, each with how many copies follow one another there: little, however many copies."""


def _in_a_row(ahead: _Runs, behind: _Runs) -> _Runs:
    """Return the hosts of copies and of those behind them."""
    (host, count), (next_host, next_count) = ahead[-1], behind[0]
    if host != next_host:
        return [*ahead, *behind]
    return [*ahead[:-1], (host, count + next_count), *behind[1:]]
