"""Slots of shared memory: written by one process, used in place by another.

A slot is an anonymous file in memory (`memfd`): it has no name, nothing is left behind when
processes are killed, and the size limit of /dev/shm in a container does not apply.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpipe_hpc.comm.wire import TensorMeta

ALIGNMENT = 64  # bytes: a cache line, and what vector loads like

_Memory = ctypes.Array[ctypes.c_char]


@dataclass
class Slot:
    """A piece of memory that two processes see."""

    index: int
    size_bytes: int
    memory: _Memory

    @classmethod
    def create(cls, index: int, size_bytes: int) -> tuple["Slot", int]:
        """Make a slot; return it and the file descriptor to hand over (the caller closes it)."""
        size_bytes = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("gpipe_hpc", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size_bytes)
            return cls(index, size_bytes, _map(descriptor, size_bytes)), descriptor
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, index: int, descriptor: int) -> "Slot":
        """Map the slot of another process; takes the descriptor over."""
        try:
            size_bytes = os.fstat(descriptor).st_size
            return cls(index, size_bytes, _map(descriptor, size_bytes))
        finally:
            os.close(descriptor)

    def write(self, header: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Lay a header and tensors out from the start."""
        memoryview(self.memory).cast("B")[: len(header)] = header
        offset = len(header)
        for tensor in tensors:
            offset = aligned(offset)
            if tensor.numel():
                flat = torch.frombuffer(
                    self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
                )
                flat.view(tensor.shape).copy_(tensor)
            offset += tensor.numel() * tensor.element_size()

    def read_header(self, num_bytes: int) -> bytes:
        """Return the header."""
        return bytes(memoryview(self.memory)[:num_bytes])

    def tensors(
        self, header_bytes: int, metas: Sequence[TensorMeta], release: Callable[[], None]
    ) -> list[torch.Tensor]:
        """Return the tensors in place; `release` is called when none of them is used any more."""
        # Each tensor holds this object through its storage; it dies with the last of them.
        lease = (ctypes.c_char * self.size_bytes).from_buffer(self.memory)
        weakref.finalize(lease, release).atexit = False
        offset, result = header_bytes, []
        for meta in metas:
            offset = aligned(offset)
            count = num_elements(meta)
            if count:
                flat = torch.frombuffer(lease, dtype=meta.dtype, count=count, offset=offset)
                result.append(flat.view(meta.shape))
            else:
                result.append(torch.empty(meta.shape, dtype=meta.dtype))
            offset += count * meta.dtype.itemsize
        return result


def _map(descriptor: int, size_bytes: int) -> _Memory:
    """Map a file into memory for as long as anything refers to the array.

    Not by `mmap`: its objects keep a descriptor open each, and a rank has as many slots as
    micro-batches are on their way, of which a process may have a thousand and more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    # A null pointer, the length, protection, flags, the descriptor, an offset.
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, size_bytes, access, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {size_bytes} bytes: {os.strerror(number)}")
    memory = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size_bytes).atexit = False
    return memory


class SlotPool:
    """The sender's slots of one channel: reused when released, replaced when too small."""

    def __init__(self) -> None:
        self._free: dict[int, Slot] = {}
        self._used: dict[int, Slot] = {}
        self._num_made = 0

    def take(self, size_bytes: int) -> tuple[Slot, int | None, int | None]:
        """Return a slot of at least `size_bytes`, its descriptor if it is new, and the index
        of a slot that is given up for it."""
        fitting = [s for s in self._free.values() if size_bytes <= s.size_bytes]
        if fitting:
            slot = min(fitting, key=lambda s: s.size_bytes)
            self._used[slot.index] = self._free.pop(slot.index)
            return slot, None, None
        retired = next(iter(self._free), None)
        if retired is not None:
            del self._free[retired]
        slot, descriptor = Slot.create(self._num_made, size_bytes)
        self._num_made += 1
        self._used[slot.index] = slot
        return slot, descriptor, retired

    def give_back(self, index: int) -> None:
        """Note that the receiver uses a slot no more."""
        self._free[index] = self._used.pop(index)


def aligned(offset: int) -> int:
    """Return the next aligned offset."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def num_elements(meta: TensorMeta) -> int:
    """Return the number of elements of a tensor to come."""
    count = 1
    for length in meta.shape:
        count *= length
    return count


def message_bytes(header_bytes: int, metas: Sequence[TensorMeta]) -> int:
    """Return the room that a header and tensors take in a slot."""
    end = header_bytes
    for meta in metas:
        end = aligned(end) + num_elements(meta) * meta.dtype.itemsize
    return end
