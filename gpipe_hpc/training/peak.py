"""The most memory that this rank has used."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of tensors on an accelerator, of the resident process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
