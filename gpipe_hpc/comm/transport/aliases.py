"""Tensors that have elements in common: views of one another, or of a third one.

A tensor that occurs twice in a nest is not such a case: it stays one tensor. Views become separate
tensors after a cut. This makes no difference as long as they are only read; a write in place into
one would have to change the others, also for autograd. So memory that several views share is sent
once and shared again by the receiver, and the stage that runs layers on it can refuse writes.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd
from typing import Final, NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """How the elements of a tensor lie in memory; `offset_bytes` counts from its beginning."""

    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """Return how a tensor lies in its storage."""
        offset = int(tensor.storage_offset()) * tensor.itemsize
        return cls(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def end_bytes(self) -> int:
        """Return where the last element ends."""
        spans = ((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.offset_bytes + (sum(spans) + 1) * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """Return the tensor that lies so in a block of bytes."""
        offset = int(memory.storage_offset()) + self.offset_bytes
        own = torch.empty(0, dtype=self.dtype, device=memory.device)
        place = offset // self.dtype.itemsize
        return own.set_(memory.untyped_storage(), place, self.shape, self.strides)


class Block(NamedTuple):
    """Memory that several tensors share: its bytes, and each one's place in it, by position."""

    memory: Tensor
    views: dict[int, View]


_MARK: Final = "_lies_in_a_buffer"
_ALIGNMENT = 16  # bytes: that of the widest dtype


def is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is its elements in a storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def mark_buffer(tensor: Tensor) -> None:
    """Mark what lies, where it was made, in a buffer or a frozen parameter of a layer."""
    setattr(tensor, _MARK, True)


def is_buffer(tensor: Tensor) -> bool:
    """Say whether a tensor is so marked; views and copies of it are not."""
    return hasattr(tensor, _MARK)


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages that tensors lie in."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if is_plain(tensor)}


def shared_blocks(tensors: Sequence[Tensor]) -> list[Block]:
    """Return the memory that several of these tensors, all different, have elements of."""
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if is_plain(tensor) and tensor.numel():
            places.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    if len(places) == len(tensors):
        return []
    return [
        _block(tensors[group[0]], {place: View.of(tensors[place]) for place in group})
        for together in places.values()
        if len(together) > 1
        for group in _groups(tensors, together)
    ]


def cloned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return clones of different tensors; those that shared elements do so again."""
    clones = [tensor.clone() for tensor in tensors]
    for block in shared_blocks(tensors):
        memory = block.memory.clone()
        for place, view in block.views.items():
            clones[place].data = view.on(memory)
    return clones


def _block(tensor: Tensor, views: dict[int, View]) -> Block:
    start = min(view.offset_bytes for view in views.values())
    start -= start % _ALIGNMENT
    size = max(view.end_bytes for view in views.values()) - start
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), start, (size,), (1,))
    moved = {p: v._replace(offset_bytes=v.offset_bytes - start) for p, v in views.items()}
    return Block(memory, moved)


def _groups(tensors: Sequence[Tensor], places: Sequence[int]) -> list[list[int]]:
    """Return which of the tensors of one storage have elements in common, directly or by others."""
    groups: list[list[int]] = []
    for place in places:
        view = View.of(tensors[place])
        met = [g for g in groups if any(_meet(view, View.of(tensors[other])) for other in g)]
        groups = [g for g in groups if g not in met] + [[*(p for g in met for p in g), place]]
    return [sorted(group) for group in groups if len(group) > 1]


def _meet(one: View, other: View) -> bool:
    """Say whether two views of one storage have bytes in common."""
    if one.end_bytes <= other.offset_bytes or other.end_bytes <= one.offset_bytes:
        return False
    start = min(one.offset_bytes, other.offset_bytes)
    return _meet_exactly(
        one._replace(offset_bytes=one.offset_bytes - start),
        other._replace(offset_bytes=other.offset_bytes - start),
    )


@lru_cache(maxsize=1024)
def _meet_exactly(one: View, other: View) -> bool:
    unit = gcd(one.dtype.itemsize, other.dtype.itemsize, one.offset_bytes, other.offset_bytes)
    size = max(one.end_bytes, other.end_bytes) // unit
    marks = torch.zeros(size, dtype=torch.bool, device="cpu")
    _in_units(one, unit, marks).fill_(True)
    return bool(_in_units(other, unit, marks).any())


def _in_units(view: View, unit: int, marks: Tensor) -> Tensor:
    """Return the marks of a view's elements, each of one or more units of bytes."""
    ratio = view.dtype.itemsize // unit
    strides = (*(stride * ratio for stride in view.strides), 1)
    return marks.as_strided((*view.shape, ratio), strides, view.offset_bytes // unit)
