"""Is there room in memory for what a checkpoint brings beside the model?"""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from gpipe_hpc.comm.group import Group, rank_names
from gpipe_hpc.comm.machine import shared_identity
from gpipe_hpc.errors import CheckpointError

_CGROUPS: Final = Path("/sys/fs/cgroup")
_GIVEN_UP: Final = ("inactive_file ", "active_file ")


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
    return min([*_of_the_machine(), *_of_the_job()], default=None)


def _of_the_machine() -> Iterator[int]:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _of_the_job() -> Iterator[int]:
    """Yield what each control group around this process leaves: those of Slurm, Kubernetes."""
    for line in _lines(Path("/proc/self/cgroup")):
        kinds, group = line.split(":", 2)[1:]
        if kinds not in ("", "memory"):
            continue
        limit, used = ("memory.max", "memory.current")
        root = _CGROUPS
        if kinds == "memory":
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            root = _CGROUPS / "memory"
        folder = root / group.lstrip("/")
        for each in [folder, *folder.parents]:
            if each.is_relative_to(root):
                yield from _headroom(each, limit, used)


def _headroom(folder: Path, limit: str, used: str) -> Iterator[int]:
    most, now = _lines(folder / limit), _lines(folder / used)
    if most and now and most[0].isdigit():
        # Pages of files are given up where memory lacks, also those read a moment ago.
        cached = [line for line in _lines(folder / "memory.stat") if line.startswith(_GIVEN_UP)]
        yield int(most[0]) - int(now[0]) + sum(int(line.split()[1]) for line in cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
