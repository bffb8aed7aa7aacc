"""Prediction of the threads and of the concurrently computing ranks of a planned run's hosts."""

import os
from typing import NamedTuple

import torch

from gpipe_hpc.device.cores.assignment import CpuRequest, assign_cpus
from gpipe_hpc.device.cores.inherited import inherited_cpus, user_chose_threads
from gpipe_hpc.device.cores.machine import allowed_cpus, cores_with, tightest_quota


class CpuShare(NamedTuple):
    """A rank's number of intra-op threads, and the number of other ranks that compute meanwhile."""

    num_threads: int
    num_others: int

    def __str__(self) -> str:
        """Format as in ``on 2 threads while another process computes``."""
        threads = f"on {self.num_threads} thread{'s' * (self.num_threads > 1)}"
        if not self.num_others:
            return threads
        others = "another process computes" if self.num_others == 1 else "others compute"
        number = "" if self.num_others == 1 else f"{self.num_others} "
        return f"{threads} while {number}{others}"


def planned_share(num_ranks: int, num_threads: str | int | None, *, binds: bool = True) -> CpuShare:
    """Return the share of the host that each of `num_ranks` planned ranks will get from `bind`.

    The host is assumed to be like this one. The number of concurrently computing ranks is limited
    by the available cores.

    Args:
        num_ranks: number of ranks on the host.
        num_threads: as in `bind`.
        binds: whether `bind` will give each rank its own cores.
    """
    wish = requested_threads(num_threads)
    given = inherited_cpus()
    if given is None:
        own, num_cores = wish or torch.get_num_threads(), os.cpu_count() or 1
    else:
        quota, cores = tightest_quota(), cores_with(given)
        lots = assign_cpus(cores, [CpuRequest(given, None, quota, wish)] * num_ranks, binds=binds)
        own = min(lots[0].num_threads)
        num_cores = sum(bool(core.cpus & given) for core in cores)
        if quota is not None:
            num_cores = min(num_cores, max(1, int(quota.num_cpus)))
    return CpuShare(own, max(1, min(num_ranks, num_cores // own)) - 1)


def share_of_bound(num_ranks: int) -> CpuShare:
    """Return the share of the host that this rank, already bound by `bind`, has among `num_ranks`.

    Other ranks count only if they use cores that this process left free. If a launcher has given
    each rank its own cores, no other rank counts.
    """
    given, own = inherited_cpus(), allowed_cpus()
    left = frozenset[int]() if given is None or own is None else given - own
    num_cores = sum(bool(core.cpus & left) for core in cores_with(left)) if left else 0
    num_threads = torch.get_num_threads()
    return CpuShare(num_threads, min(num_ranks - 1, num_cores // num_threads))


def requested_threads(num_threads: str | int | None) -> int | None:
    """Return the threads set by settings or by the user; None for one per core of the rank."""
    if isinstance(num_threads, int):
        return num_threads
    if num_threads == "auto" and not user_chose_threads():
        return None
    return torch.get_num_threads()
