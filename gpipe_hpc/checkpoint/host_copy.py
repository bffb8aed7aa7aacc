"""A copy of tensors in host memory, at one moment: what is then written may take its time."""

from collections.abc import Mapping
from typing import Final

import torch

from gpipe_hpc.device.device import Device

_ALIGNMENT: Final = 64


class HostBuffer:
    """Host memory that is used again for each copy, pinned where an accelerator fills it.

    It grows to the largest copy so far and belongs to one copy at a time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """Return that many bytes, of any content; what was returned before is not valid now."""
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # given back before more is taken
            self._bytes = self._device.pinned((num_bytes,), torch.uint8)
        return self._bytes[:num_bytes]

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of tensors by name, which lie in this buffer, once they are there."""
        offsets, total = lay_side_by_side(tensors)
        copies = views(self.reserve(total), tensors, offsets)
        fill(copies, tensors, self._device)
        return copies


def lay_side_by_side(tensors: Mapping[str, torch.Tensor], start: int = 0) -> tuple[list[int], int]:
    """Return where each tensor begins if one lies behind the other, and where the last ends."""
    offsets = []
    for tensor in tensors.values():
        start += -start % _ALIGNMENT
        offsets.append(start)
        start += tensor.nbytes
    return offsets, start


def views(
    memory: torch.Tensor, tensors: Mapping[str, torch.Tensor], offsets: list[int]
) -> dict[str, torch.Tensor]:
    """Return tensors of these names, types and shapes that lie in `memory`, at these bytes."""
    return {
        name: memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
    }


def fill(
    copies: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], device: Device
) -> None:
    """Copy tensors of `device` and of the host; returns when all are there."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            device.fetch_into(copies[name], tensor)
    device.synchronize()
