"""Check for free memory before a checkpoint is loaded."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gpipe_hpc.comm.collectives.group import Gathering, rank_names
from gpipe_hpc.device.device import Device, HostDevice
from gpipe_hpc.device.host.machine import shared_identity
from gpipe_hpc.errors import CheckpointError


def check_room(
    path: Path, group: Gathering, device: Device, needed: Mapping[torch.device, int]
) -> None:
    """Raise CheckpointError on all ranks if a host or device lacks free memory. Collective.

    `needed` is the number of bytes that this rank needs on the host and on `device`; the needs of
    ranks that share a host or device are added up.
    """
    host = shared_identity("mnt") or socket.gethostname()
    own = {
        f"{host} {where}": (size, (device if where == device.torch else HostDevice()).memory_free())
        for where, size in needed.items()
    }
    first = group.ranks[0]
    told = group.gather_object(own, first)
    lacking = group.broadcast_object(told and _lacking(group.ranks, told), first)
    if lacking:
        raise CheckpointError(f"checkpoint {path}: {lacking}")


def _lacking(
    ranks: Sequence[int], told: Sequence[Mapping[str, tuple[int, int | None]]]
) -> str | None:
    """Return the message for the first host or device with too little memory, or None.

    `told` contains, for each rank, the needed and free bytes by host or device.
    """
    sharing: dict[str, list[tuple[int, int, int | None]]] = {}
    for rank, own in zip(ranks, told, strict=True):
        for place, (need, free) in own.items():
            sharing.setdefault(place, []).append((rank, need, free))
    for _, there in sorted(sharing.items()):
        size = sum(need for _, need, _ in there)
        free = min((free for *_, free in there if free is not None), default=None)
        if free is not None and size > free:
            return (
                f"loading needs {size / 1e6:,.3f} MB of memory on "
                f"{rank_names([rank for rank, *_ in there])} (the optimizer's state and the "
                f"largest tensor), but {free / 1e6:,.3f} MB are free; stop other processes, use "
                f"more machines, or load only the weights: pipe.load without an optimizer"
            )
    return None
