"""Pinned host memory for what one stage moves out and back: made once, used step after step.

To pin memory takes the system longer than a copy; what torch keeps of it is rounded up to powers of
two.
"""

from collections import defaultdict

import torch

from gpipe_hpc.comm.device import Device


class HostRoom:
    """Pinned buffers by size, and the stream that all copies from and to them run on.

    That one stream carries out all copies in order, so a buffer may be written again as soon as the
    copy from it was started.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream()
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._unused: dict[int, list[torch.Tensor]] = defaultdict(list)  # in this step so far

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer, uint8[num_bytes]."""
        for known in (self._free, self._unused):
            if known[num_bytes]:
                return known[num_bytes].pop()
        return self.device.pinned((num_bytes,), torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; the copy from it was started."""
        self._free[buffer.numel()].append(buffer)

    def end(self) -> None:
        """End a step: buffers of sizes that it did not use are let go of."""
        self._unused, self._free = self._free, defaultdict(list)
