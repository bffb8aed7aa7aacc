"""Is there room in memory for what a checkpoint brings beside the model?"""

import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from gpipe_hpc.comm.group import Group, rank_names
from gpipe_hpc.comm.host_memory import free_bytes as free_on_host
from gpipe_hpc.comm.machine import shared_identity
from gpipe_hpc.errors import CheckpointError


def check_room(path: Path, group: Group, needed: Mapping[torch.device, int]) -> None:
    """Refuse to load where ranks of a host, or of a device, need more bytes than are free there.

    `needed`: this rank's, by device. All ranks call it; CheckpointError on all of them.
    """
    host = shared_identity("mnt") or socket.gethostname()
    own = {f"{host} {device}": (size, free_bytes(device)) for device, size in needed.items()}
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


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes may still be allocated there; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    return free_on_host()
