"""Host memory that copies run to and from beside the compute, used again and again."""

import threading
from collections.abc import Sequence
from typing import Final

import torch

from gpipe_hpc.device.device import Device, Event

_GRAIN_BYTES: Final = 4096


class Buffer:
    """Pinned memory for one message, until it is released."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.in_use_until: Event | None = None

    @property
    def size_bytes(self) -> int:
        """Return how much there is."""
        return self.memory.numel()

    def flat(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first elements of a type, in one row."""
        return self.memory[: num_elements * dtype.itemsize].view(dtype)


class PinnedPool:
    """Buffers that are kept: pinning memory takes longer than most messages.

    A buffer is given out again once it was released and the event that came with that is done. As
    with the slots of shared memory, one that is too small is replaced, so there are no more of them
    than were ever in use at once. Any thread may take and release.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._released: list[Buffer] = []
        self.num_made = 0

    def take(self, size_bytes: int) -> Buffer:
        """Return a buffer of at least this size that nothing uses."""
        with self._lock:
            idle = [buffer for buffer in self._released if _is_idle(buffer)]
            fitting = _smallest([buffer for buffer in idle if buffer.size_bytes >= size_bytes])
            # Where none is large enough, the smallest makes room for a larger one.
            given_up = fitting or _smallest(idle)
            if given_up is not None:
                self._released.remove(given_up)
            if fitting is None:
                self.num_made += 1
        if fitting is not None:
            fitting.in_use_until = None
            return fitting
        rounded = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        return Buffer(self._device.pinned((rounded,), torch.uint8))

    def release(self, buffer: Buffer, until: Event | None = None) -> None:
        """Take a buffer back, to be given out once `until` is done."""
        buffer.in_use_until = until
        with self._lock:
            self._released.append(buffer)


def _is_idle(buffer: Buffer) -> bool:
    return buffer.in_use_until is None or buffer.in_use_until.query()


def _smallest(buffers: Sequence[Buffer]) -> Buffer | None:
    return min(buffers, key=lambda buffer: buffer.size_bytes, default=None)
