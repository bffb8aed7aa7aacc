"""Facts about each rank, its host and its device, collected by the rank itself."""

import platform
import shutil
import socket
from pathlib import Path
from typing import Final, NamedTuple

import torch

from gpipe_hpc.checkpoint.in_memory import DEFAULT_FOLDER
from gpipe_hpc.device.device import Device
from gpipe_hpc.device.host.host_memory import free_bytes
from gpipe_hpc.device.host.machine import kernel_identity, shared_identity
from gpipe_hpc.errors import DeviceError
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.preflight.clocks import ClockReading
from gpipe_hpc.preflight.memory_needs import MemoryNeed
from gpipe_hpc.preflight.rank_checks import OpenFiles

_SIDE: Final = 256  # small enough for all sums to be exact in float32


class Facts(NamedTuple):
    """Facts about one rank; sizes in bytes, None if the system does not report them."""

    rank: int
    host: str
    kernel: str
    network: str  # equal for ranks that can connect to each other over 127.0.0.1
    python: str
    device: str
    device_free_bytes: int | None
    host_free_bytes: int | None
    shm_free_bytes: int | None
    planned_bytes: int | None
    files: OpenFiles
    needs: tuple[MemoryNeed, ...]
    entry: ClockReading
    exit: ClockReading

    @property
    def machine(self) -> str:
        """Return an identifier of the host; host names may repeat and differ between containers."""
        return f"{self.kernel} {self.network}"

    @classmethod
    def of(
        cls,
        rank: int,
        device: Device,
        planned: RankForecast | None,
        needs: tuple[MemoryNeed, ...],
        attended: tuple[ClockReading, ClockReading],
    ) -> "Facts":
        """Collect the facts of this rank."""
        shm = Path(DEFAULT_FOLDER)
        return cls(
            rank,
            socket.gethostname(),
            kernel_identity(),
            shared_identity("net") or socket.gethostname(),
            platform.python_version(),
            device.name,
            device.memory_free() if device.is_accelerator else None,
            free_bytes(),
            shutil.disk_usage(shm).free if shm.is_dir() else None,
            None if planned is None else planned.total_bytes,
            OpenFiles.of(rank),
            needs,
            *attended,
        )


def try_device(device: Device, rank: int) -> None:
    """Check that the device computes a known sum correctly; raise DeviceError if not."""
    row = torch.arange(_SIDE, dtype=torch.float32)
    square = device.to_device(row.repeat(_SIDE, 1))
    found = device.to_host((square @ torch.ones_like(square)).sum()).item()
    expected = _SIDE**2 * row.sum().item()
    if found != expected:
        raise DeviceError(
            f"device: rank {rank} on {socket.gethostname()}: {device.name} computed a wrong sum, "
            f"expected {expected:g}, got {found:g}; do not use this device, and have it repaired"
        )
