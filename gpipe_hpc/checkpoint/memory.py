"""Is there room in memory for what a checkpoint brings beside the model?"""

import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from gpipe_hpc.comm.device import Device, HostDevice
from gpipe_hpc.comm.group import Gathering, rank_names
from gpipe_hpc.comm.host.machine import shared_identity
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
    told: list[dict[str, tuple[int, int | None]]] = group.all_gather_object(own)
    for place in sorted({name for part in told for name in part}):
        sharing = [
            (r, part[place]) for r, part in zip(group.ranks, told, strict=True) if place in part
        ]
        size = sum(need for _, (need, _) in sharing)
        free = min((free for _, (_, free) in sharing if free is not None), default=None)
        if free is not None and size > free:
            raise CheckpointError(
                f"checkpoint {path}: expected room for {size / 1e6:,.3f} MB more on "
                f"{rank_names([rank for rank, _ in sharing])} (the optimizer's state and the "
                f"largest tensor), got {free / 1e6:,.3f} MB free; end what else runs there, use "
                f"more machines, or load the weights alone: pipe.load without an optimizer"
            )
