"""The algorithm that a group's own link speaks for: measured once, then chosen by size.

All ranks choose alike, because all take the link that one of them has fitted.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch

from gpipe_hpc.comm.collectives.costs import Link
from gpipe_hpc.comm.collectives.fitting import Fit, Sample, fit
from gpipe_hpc.comm.collectives.menu import start_all_reduce, start_broadcast
from gpipe_hpc.comm.collectives.tuning import choose, terms
from gpipe_hpc.comm.device import Device, HostDevice
from gpipe_hpc.comm.group import Group, Pending

SIZES: Final = (1024, 64 * 1024, 1024 * 1024)
REPEATS: Final = 5
_ALGORITHMS: Final = ("ring", "recursive_doubling")


def measured_link(
    group: Group,
    device: Device | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
) -> Fit:
    """Time a few all-reduces over vectors of `sizes` bytes and fit the link to them.

    Every rank calls it and gets the same. Takes some 50 times what the longest of them takes. A
    group of one rank has no link: it gets one that costs nothing. `device`: whose memory the
    vectors lie in; None for the CPU's.
    """
    if group.size == 1:
        return Fit(Link(0.0, 0.0), 0.0)
    samples = []
    device = device or HostDevice()
    for num_bytes in sizes:
        vector = torch.zeros(max(1, num_bytes // 4), device=device.torch)
        for name in _ALGORITHMS:
            seconds = [_seconds(group, vector, name, device) for _ in range(1 + repeats)][1:]
            slowest = torch.tensor(seconds, dtype=torch.float64)
            group.all_reduce_max(slowest)
            form = terms("all_reduce", name, group.size, vector.nbytes, vector.nbytes)
            samples.append(Sample(form, statistics.median(slowest.tolist())))
    # Of one rank: another host's arithmetic might turn a choice.
    found: Fit = group.broadcast_object(fit(samples), group.ranks[0])
    return found


def start_tuned_all_reduce(group: Group, tensor: torch.Tensor, link: Link) -> Pending:
    """Start an all-reduce by the algorithm that is fastest over `link`, the same everywhere."""
    choice = choose("all_reduce", link, group.size, tensor.nbytes)
    return start_all_reduce(group, tensor, choice.algorithm, block_bytes=choice.block_bytes)


def start_tuned_broadcast(group: Group, tensor: torch.Tensor, root: int, link: Link) -> Pending:
    """Start a broadcast by the algorithm that is fastest over `link`, the same everywhere."""
    choice = choose("broadcast", link, group.size, tensor.nbytes)
    return start_broadcast(group, tensor, root, choice.algorithm, block_bytes=choice.block_bytes)


def _seconds(group: Group, vector: torch.Tensor, name: str, device: Device) -> float:
    group.all_reduce(torch.zeros(1))  # all begin together
    began_s = time.perf_counter()
    start_all_reduce(group, vector, name).wait()
    device.synchronize()
    return time.perf_counter() - began_s
