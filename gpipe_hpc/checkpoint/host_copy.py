"""Copies of tensors in host memory, which can be written to disk while training continues."""

from collections.abc import Mapping
from typing import Final

import torch

from gpipe_hpc.device.device import Device

_ALIGNMENT: Final = 64


class HostBuffer:
    """Reusable host memory for copies, pinned if an accelerator fills it.

    It grows to the size of the largest copy. A new copy invalidates the previous one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialized memory of `num_bytes`; memory returned earlier becomes invalid."""
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free before allocating more
            self._bytes = self._device.pinned((num_bytes,), torch.uint8)
        return self._bytes[:num_bytes]

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors into this buffer, wait for completion, and return the copies by name."""
        offsets, total = aligned_offsets(tensors)
        copies = views(self.reserve(total), tensors, offsets)
        fill(copies, tensors, self._device)
        return copies


def aligned_offsets(tensors: Mapping[str, torch.Tensor], start: int = 0) -> tuple[list[int], int]:
    """Return aligned byte offsets of tensors stored one after another, and the end of the last."""
    offsets = []
    for tensor in tensors.values():
        start += -start % _ALIGNMENT
        offsets.append(start)
        start += tensor.nbytes
    return offsets, start


def views(
    memory: torch.Tensor, tensors: Mapping[str, torch.Tensor], offsets: list[int]
) -> dict[str, torch.Tensor]:
    """Return views of `memory` at `offsets`, with the names, dtypes and shapes of `tensors`."""
    return {
        name: memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
    }


def fill(
    copies: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], device: Device
) -> None:
    """Copy tensors of `device` or the host into `copies`, and wait for completion."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            device.copy_to_host(copies[name], tensor)
    device.synchronize()
