"""Detection of tensors that share elements: views of one another or of a third tensor.

Views become separate tensors at a stage boundary. This makes no difference as long as they are only
read; a write in place into one of them would have to change the others, also for autograd. So
memory that several views share is sent once and shared again by the receiver, and the receiving
stage can refuse writes. A tensor that occurs twice in a nest stays one tensor and is no such case.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd
from typing import Final, NamedTuple

import torch
from torch import Tensor


class TensorLayout(NamedTuple):
    """Layout of a tensor in memory; `offset_bytes` counts from the start of the memory."""

    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorLayout":
        """Return the layout of a tensor in its storage."""
        offset = int(tensor.storage_offset()) * tensor.itemsize
        return cls(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def end_bytes(self) -> int:
        """Return the offset of the end of the last element."""
        spans = ((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.offset_bytes + (sum(spans) + 1) * self.dtype.itemsize

    def on(self, memory: Tensor) -> Tensor:
        """Return the tensor with this layout in a block of bytes."""
        offset = int(memory.storage_offset()) + self.offset_bytes
        own = torch.empty(0, dtype=self.dtype, device=memory.device)
        place = offset // self.dtype.itemsize
        return own.set_(memory.untyped_storage(), place, self.shape, self.strides)


class AliasedMemory(NamedTuple):
    """Memory that several tensors share: its bytes, and the layout of each tensor by position."""

    memory: Tensor
    views: dict[int, TensorLayout]


_MARK: Final = "_lies_in_a_buffer"
_ALIGNMENT = 16  # bytes: that of the widest dtype


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and strided."""
    return tensor.layout is torch.strided and not tensor.is_nested


def mark_buffer(tensor: Tensor) -> None:
    """Mark a tensor as belonging to a layer's buffer or frozen parameter."""
    setattr(tensor, _MARK, True)


def is_buffer(tensor: Tensor) -> bool:
    """Return whether a tensor was marked by `mark_buffer`; its views and copies are not."""
    return hasattr(tensor, _MARK)


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return identities of the storages of tensors."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if is_plain(tensor)}


def shared_blocks(tensors: Sequence[Tensor]) -> list[AliasedMemory]:
    """Return the blocks of memory that several of these distinct tensors share."""
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if is_plain(tensor) and tensor.numel():
            places.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    if len(places) == len(tensors):
        return []
    return [
        _block(tensors[group[0]], {place: TensorLayout.of(tensors[place]) for place in group})
        for together in places.values()
        if len(together) > 1
        for group in _groups(tensors, together)
    ]


def cloned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clone distinct tensors; clones share elements if their originals do."""
    clones = [tensor.clone() for tensor in tensors]
    for block in shared_blocks(tensors):
        memory = block.memory.clone()
        for place, view in block.views.items():
            clones[place].data = view.on(memory)
    return clones


def _block(tensor: Tensor, views: dict[int, TensorLayout]) -> AliasedMemory:
    start = min(view.offset_bytes for view in views.values())
    start -= start % _ALIGNMENT
    size = max(view.end_bytes for view in views.values()) - start
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    memory.set_(tensor.untyped_storage(), start, (size,), (1,))
    moved = {p: v._replace(offset_bytes=v.offset_bytes - start) for p, v in views.items()}
    return AliasedMemory(memory, moved)


def _groups(tensors: Sequence[Tensor], places: Sequence[int]) -> list[list[int]]:
    """Return groups of tensors of one storage that share elements, directly or transitively."""
    groups: list[list[int]] = []
    for place in places:
        view = TensorLayout.of(tensors[place])
        met = [
            g for g in groups if any(_meet(view, TensorLayout.of(tensors[other])) for other in g)
        ]
        groups = [g for g in groups if g not in met] + [[*(p for g in met for p in g), place]]
    return [sorted(group) for group in groups if len(group) > 1]


def _meet(one: TensorLayout, other: TensorLayout) -> bool:
    """Return whether two views of one storage have bytes in common."""
    if one.end_bytes <= other.offset_bytes or other.end_bytes <= one.offset_bytes:
        return False
    start = min(one.offset_bytes, other.offset_bytes)
    return _meet_exactly(
        one._replace(offset_bytes=one.offset_bytes - start),
        other._replace(offset_bytes=other.offset_bytes - start),
    )


@lru_cache(maxsize=1024)
def _meet_exactly(one: TensorLayout, other: TensorLayout) -> bool:
    unit = gcd(one.dtype.itemsize, other.dtype.itemsize, one.offset_bytes, other.offset_bytes)
    size = max(one.end_bytes, other.end_bytes) // unit
    marks = torch.zeros(size, dtype=torch.bool, device="cpu")
    _in_units(one, unit, marks).fill_(True)
    return bool(_in_units(other, unit, marks).any())


def _in_units(view: TensorLayout, unit: int, marks: Tensor) -> Tensor:
    """Return the view of `marks`, which has one element per `unit` bytes, that a tensor covers."""
    ratio = view.dtype.itemsize // unit
    strides = (*(stride * ratio for stride in view.strides), 1)
    return marks.as_strided((*view.shape, ratio), strides, view.offset_bytes // unit)
