"""Sums over the copies of a stage by algorithms of our own, over sends and receives."""

from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Final

import torch

from gpipe_hpc.comm.collectives.costs import Link
from gpipe_hpc.comm.collectives.menu import HIERARCHICAL, start_all_reduce
from gpipe_hpc.comm.collectives.tuned import measured_link, start_tuned_all_reduce
from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.comm.host.machine import shared_identity
from gpipe_hpc.engine.outer.items import Item

_HOST_BYTES: Final = 8  # of what stands for a host


class ByAlgorithm:
    """One algorithm of ours for all buckets; a hierarchical one needs the host of each copy."""

    def __init__(self, group: Group, name: str, hosts: Sequence[Hashable] | None = None) -> None:
        self._group, self._name, self._hosts = group, name, hosts

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing over the group, in place."""
        return start_all_reduce(self._group, flat, self._name, hosts=self._hosts)


class Tuned:
    """For each bucket the algorithm that is fastest for its size over the measured link."""

    def __init__(self, group: Group, device: Device) -> None:
        """Measure the link; the same call on all copies."""
        self._group = group
        self._link: Link = measured_link(group, device).link

    def start(self, flat: torch.Tensor, items: Sequence[Item] = ()) -> Pending:
        """Start summing over the group, in place."""
        return start_tuned_all_reduce(self._group, flat, self._link)


def hierarchical(group: Group, hierarchy: str | int) -> ByAlgorithm:
    """Return the sum inside hosts first, then between them; the same call on all copies.

    `hierarchy`: ``host``, or how many copies that follow one another count as one host: a divisor
    of their number.
    """
    if isinstance(hierarchy, int):
        return ByAlgorithm(group, HIERARCHICAL, [i // hierarchy for i in range(group.size)])
    # Who shares a network interface with nobody is a host of his own.
    own = shared_identity("net") or f"position {group.position}"
    host = blake2b(own.encode(), digest_size=_HOST_BYTES).hexdigest()
    runs = group.merge_object([(host, 1)], _in_a_row)
    return ByAlgorithm(group, HIERARCHICAL, [host for host, count in runs for _ in range(count)])


_Runs = list[tuple[str, int]]
"""Hosts, each with how many copies follow one another there: little, however many copies."""


def _in_a_row(ahead: _Runs, behind: _Runs) -> _Runs:
    """Return the hosts of copies and of those behind them."""
    (host, count), (next_host, next_count) = ahead[-1], behind[0]
    if host != next_host:
        return [*ahead, *behind]
    return [*ahead[:-1], (host, count + next_count), *behind[1:]]
