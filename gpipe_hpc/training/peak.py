"""The memory that this rank has used: of tensors on an accelerator, of the process on a CPU."""

import resource
import sys
from pathlib import Path
from typing import Final

import torch

_STATUS: Final = Path("/proc/self/status")

PEAK_MEANING: Final = {
    "cpu": "resident memory of the rank's process at its fullest, interpreter and libraries in it",
    "cuda": "memory of the rank's tensors on its device at the fullest",
}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of tensors on an accelerator, of the resident process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not what the system counts for the process: that may be the peak of who started it.
    told = _status_bytes("VmHWM")
    if told is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def used_memory_bytes(device: torch.device) -> int:
    """Return what is used now, in the same sense; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS") or 0


def _status_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, IndexError):
        return None
    return int(kib) * 1024
