"""Sums over the copies of a stage by algorithms of our own, over sends and receives."""

from collections.abc import Hashable, Sequence

import torch

from gpipe_hpc.comm.collectives.costs import Link
from gpipe_hpc.comm.collectives.menu import HIERARCHICAL, start_all_reduce
from gpipe_hpc.comm.collectives.tuned import measured_link, start_tuned_all_reduce
from gpipe_hpc.comm.device import Device
from gpipe_hpc.comm.group import Group, Pending
from gpipe_hpc.comm.host.machine import shared_identity
from gpipe_hpc.engine.outer.items import Item


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
    own = shared_identity("net")
    told = group.all_gather_object(own)
    return ByAlgorithm(group, HIERARCHICAL, [each or str(i) for i, each in enumerate(told)])
