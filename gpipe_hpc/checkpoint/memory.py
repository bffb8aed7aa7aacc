"""Is there room in memory for what a checkpoint brings beside the model?"""

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
    """Refuse to load where ranks of a host, or of a device, need more bytes than are free there.

    `needed`: this rank's, on the host and on `device`. All ranks call it; CheckpointError on all.
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
    """Return what the first place that has too little room lacks; `told`: by rank."""
    sharing: dict[str, list[tuple[int, int, int | None]]] = {}
    for rank, own in zip(ranks, told, strict=True):
        for place, (need, free) in own.items():
            sharing.setdefault(place, []).append((rank, need, free))
    for _, there in sorted(sharing.items()):
        size = sum(need for _, need, _ in there)
        free = min((free for *_, free in there if free is not None), default=None)
        if free is not None and size > free:
            return (
                f"expected room for {size / 1e6:,.3f} MB more on "
                f"{rank_names([rank for rank, *_ in there])} (the optimizer's state and the "
                f"largest tensor), got {free / 1e6:,.3f} MB free; end what else runs there, use "
                f"more machines, or load the weights alone: pipe.load without an optimizer"
            )
    return None
