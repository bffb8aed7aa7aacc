"""Reusable pinned host memory for copies that overlap with compute."""

import threading
from collections.abc import Sequence
from typing import Final

import torch

from gpipe_hpc.device.device import Device, Event

_GRAIN_BYTES: Final = 4096


class Buffer:
    """Pinned memory for one message, in use until it is released."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.in_use_until: Event | None = None

    @property
    def size_bytes(self) -> int:
        """Return the size of the memory in bytes."""
        return self.memory.numel()

    def flat(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `num_elements` elements as a flat tensor of a dtype."""
        return self.memory[: num_elements * dtype.itemsize].view(dtype)


class PinnedPool:
    """Pool of pinned buffers, because pinning memory takes longer than sending most messages.

    A buffer is reused once it was released and the event passed to `release` is complete. A buffer
    that is too small is replaced, so there are never more buffers than were in use at the same
    time. Thread-safe.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._released: list[Buffer] = []
        self.num_made = 0

    def take(self, size_bytes: int) -> Buffer:
        """Return an unused buffer of at least this size."""
        with self._lock:
            idle = [buffer for buffer in self._released if _is_idle(buffer)]
            fitting = _smallest([buffer for buffer in idle if buffer.size_bytes >= size_bytes])
            # If none is large enough, the smallest is replaced by a larger one.
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
        """Return a buffer to the pool, to be reused once `until` is complete."""
        buffer.in_use_until = until
        with self._lock:
            self._released.append(buffer)


def _is_idle(buffer: Buffer) -> bool:
    return buffer.in_use_until is None or buffer.in_use_until.query()


def _smallest(buffers: Sequence[Buffer]) -> Buffer | None:
    return min(buffers, key=lambda buffer: buffer.size_bytes, default=None)
