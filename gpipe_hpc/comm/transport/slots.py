"""Slots of shared memory, written by one process and read in place by another.

A slot is an anonymous file in memory (`memfd`): it has no name, nothing is left when processes are
killed, and the size limit of /dev/shm in a container does not apply.

The last byte stores whether the reader has released the slot. The reader sets it when the last
tensor in the slot is deleted, and the writer reads it when it needs a slot. This takes no system
call, never blocks, and is harmless if the writer has ended.
"""

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, cast

import torch

from gpipe_hpc.comm.transport.wire import TensorMeta

ALIGNMENT = 64  # bytes: a cache line, and the best alignment for vector loads

_STATE_BYTES = ALIGNMENT  # at the end of a slot; only the last is used
_USED, _RELEASED = b"\0", b"\1"

_Memory = ctypes.Array[ctypes.c_char]


class _SlotTensor(NamedTuple):
    """Layout of a tensor in a slot."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_elements: int
    offset_bytes: int
    strides: tuple[int, ...] | None

    def over(self, memory: _Memory) -> torch.Tensor:
        """Return the tensor at this place in the slot's memory, without a copy."""
        if not self.num_elements:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        shape, dtype, count, offset, strides = self
        row = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
        # Created in its final shape, so that it is not a view; this is also faster.
        return row.resize_(shape) if strides is None else row.as_strided_(shape, strides)


@dataclass
class Slot:
    """A block of memory shared by two processes."""

    index: int
    size_bytes: int  # largest size of a message
    memory: _Memory
    # Metadata, header length and layout of the last message, cached because most messages have
    # the same structure.
    _laid_out: tuple[Sequence[TensorMeta], int] = field(default=((), 0), init=False)
    _places: list[_SlotTensor] = field(default_factory=list, init=False)
    _tensors: list[torch.Tensor] = field(default_factory=list, init=False)  # used by the writer

    def __post_init__(self) -> None:
        self._address = ctypes.addressof(self.memory)
        self._lease = _lease_over(len(self.memory), os.getpid())

    @classmethod
    def create(cls, index: int, size_bytes: int) -> tuple["Slot", int]:
        """Create a slot; return it and its file descriptor, which the caller sends and closes."""
        mapped_bytes = -(-(size_bytes + _STATE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("gpipe_hpc", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mapped_bytes)
            memory = _map(descriptor, mapped_bytes)
            return cls(index, mapped_bytes - _STATE_BYTES, memory), descriptor
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, index: int, descriptor: int) -> "Slot":
        """Map the slot that another process has created; closes the descriptor."""
        try:
            mapped_bytes = os.fstat(descriptor).st_size
            return cls(index, mapped_bytes - _STATE_BYTES, _map(descriptor, mapped_bytes))
        finally:
            os.close(descriptor)

    @property
    def is_released(self) -> bool:
        """Return whether the reader has released the slot."""
        return self.memory[-1] == _RELEASED

    def reuse(self) -> "Slot":
        """Mark a released slot as used again."""
        self.memory[-1] = _USED
        return self

    def write(
        self, header: bytes, metas: Sequence[TensorMeta], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Write a header and tensors from the start of the slot."""
        if header:
            memoryview(self.memory).cast("B")[: len(header)] = header
        if self._lay_out(len(header), metas):
            # These tensors are used later outside of the inference mode of an evaluation.
            with torch.inference_mode(False):
                self._tensors = [place.over(self.memory) for place in self._places]
        for destination, tensor in zip(self._tensors, tensors, strict=True):
            destination.copy_(tensor)

    def read_header(self, num_bytes: int) -> bytes:
        """Return the first bytes of the slot."""
        return bytes(memoryview(self.memory)[:num_bytes])

    def tensors(self, header_bytes: int, metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
        """Return the tensors without copying; the slot is released when all of them are deleted."""
        # Each tensor references the lease through its storage, so the last one ends the lease.
        lease = self._lease.from_address(self._address)
        lease.memory = self.memory
        self._lay_out(header_bytes, metas)
        return [place.over(lease) for place in self._places]

    def _lay_out(self, header_bytes: int, metas: Sequence[TensorMeta]) -> bool:
        """Compute the layout of a message's tensors; return whether it has changed."""
        if self._laid_out[0] is metas and self._laid_out[1] == header_bytes:
            return False
        self._laid_out = (metas, header_bytes)
        self._places, offset = [], header_bytes
        for meta in metas:
            offset = aligned(offset)
            count = meta.num_elements
            self._places.append(_SlotTensor(meta.shape, meta.dtype, count, offset, meta.strides))
            offset += count * meta.dtype.itemsize
        return True


class _SlotArray(ctypes.Array[ctypes.c_char]):
    """An array over a slot that releases the slot when it is garbage-collected."""

    _type_ = ctypes.c_char
    _length_ = 0
    owner_pid = 0
    memory: _Memory  # keeps the memory mapped

    # Runs on any thread, also during interpreter shutdown. A forked child deletes its copy while
    # the parent still uses the slot.
    def __del__(self, getpid: Callable[[], int] = os.getpid, state: bytes = _RELEASED) -> None:
        if getpid() == self.owner_pid:
            self[-1] = state


@lru_cache(maxsize=64)
def _lease_over(num_bytes: int, owner_pid: int) -> type[_SlotArray]:
    """Return the lease type for slots of one size; cached, because creating types is slow."""
    made = type("_Lease", (_SlotArray,), {"_length_": num_bytes, "owner_pid": owner_pid})
    return cast(type[_SlotArray], made)


def _map(descriptor: int, size_bytes: int) -> _Memory:
    """Map a file into memory for as long as the returned array is referenced.

    Python's `mmap` is not used, because each of its objects keeps a descriptor open. A rank has as
    many slots as micro-batches in flight, and a process may open only about a thousand files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    # Arguments: null pointer, length, protection, flags, descriptor, offset.
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
        self._free: dict[int, list[Slot]] = {}  # by size
        self._used: deque[Slot] = deque()  # in the order they were taken
        self._num_made = 0

    def take(self, size_bytes: int) -> tuple[Slot, int | None, int | None]:
        """Return a slot of at least `size_bytes`, with its descriptor if it is new.

        The third value is the index of a slot that was discarded for the new one; None if there is
        none.
        """
        # Slots are mostly released in order. All slots are checked, which is slow if hundreds are
        # in use, only before a new one is created, which is slower and never frees memory.
        while self._used and self._used[0].is_released:
            self._keep(self._used.popleft())
        slot, descriptor, retired = self._fitting(size_bytes), None, None
        if slot is None:
            self._collect()
            slot = self._fitting(size_bytes)
        if slot is None:
            retired = self._pop(min(self._free)).index if self._free else None
            slot, descriptor = Slot.create(self._num_made, size_bytes)
            self._num_made += 1
        self._used.append(slot)
        return slot, descriptor, retired

    def _collect(self) -> None:
        """Make every slot that the reader has released available again."""
        used, self._used = self._used, deque()
        for slot in used:
            if slot.is_released:
                self._keep(slot)
            else:
                self._used.append(slot)

    def _fitting(self, size_bytes: int) -> Slot | None:
        """Return the smallest free slot that is large enough."""
        size = min((size for size in self._free if size >= size_bytes), default=None)
        return None if size is None else self._pop(size).reuse()

    def _keep(self, slot: Slot) -> None:
        self._free.setdefault(slot.size_bytes, []).append(slot)

    def _pop(self, size_bytes: int) -> Slot:
        slots = self._free[size_bytes]
        slot = slots.pop()
        if not slots:
            del self._free[size_bytes]
        return slot


def aligned(offset: int) -> int:
    """Return the lowest aligned offset that is not below `offset`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def message_bytes(header_bytes: int, metas: Sequence[TensorMeta]) -> int:
    """Return the bytes that a header and tensors need in a slot."""
    end = header_bytes
    for meta in metas:
        end = aligned(end) + meta.num_bytes
    return end
