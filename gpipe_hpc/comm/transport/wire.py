"""Wire format of a channel: any nest of tensors, described by a structure.

A message consists of an announcement of fixed size (`Announcement`), a header if its
structure is new to the channel, and the tensors. The announcement names the
structure, so both ends know which tensors to post.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import torch

from gpipe_hpc.comm.net.pickling import dumps, loads
from gpipe_hpc.comm.transport.aliases import TensorLayout, is_buffer, mark_buffer, shared_blocks
from gpipe_hpc.device.device import Device, HostDevice
from gpipe_hpc.errors import ModelError
from gpipe_hpc.pytree import LEAF, Nest, Tree, flatten, unflatten

WORD_LENGTH = 5
MAX_STRUCTURES = 256  # largest number of structures that a channel stores
MAX_LAYOUTS = 1024  # largest number of cached structures of single tensors
MAX_STRUCTURE_BYTES = 4 * 2**20  # limit of their total size; the newest alone may exceed it
_HOST: Final = HostDevice()
_LEAF_BYTES = 300  # approximate memory of a leaf besides its value
# Types of values that are cached by value, and the largest pickled size of such a value.
_ATOMS = frozenset({type(None), bool, int, float, str})
_SHORT_BYTES = 64


class Announcement(NamedTuple):
    """Announcement of a message: five numbers, sent as int64[5] before the tensors."""

    serial: int  # position in the channel since its start: catches lost or doubled messages
    microbatch: int
    structure: int  # identity of the structure within the channel
    header_bytes: int  # 0: the receiver knows this structure
    num_samples: int  # 0: an empty micro-batch; only posted buffers are filled


class TensorMeta(NamedTuple):
    """Metadata that a receiver needs before a tensor arrives.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        requires_grad: whether the tensor requires a gradient.
        strides: dense strides with which the tensor is sent; None if it is contiguous.
        on_device: whether the tensor is on its rank's device, or else on the host.
        is_buffer: whether it is part of a layer's buffer, which other layers must not modify.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    on_device: bool = True
    is_buffer: bool = False

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def allocate(self, device: Device) -> torch.Tensor:
        """Return an uninitialized tensor to receive into, on the device or the host."""
        home = device if self.on_device else _HOST
        if self.strides is None:
            return home.empty(self.shape, self.dtype)
        # In place, so that the result is not a view of another tensor.
        return home.empty((self.num_elements,), self.dtype).as_strided_(self.shape, self.strides)


class RepeatedLeaf(NamedTuple):
    """A leaf that is the same tensor as an earlier leaf."""

    leaf: int


class SharedLeaf(NamedTuple):
    """A leaf that shares memory with other leaves; the memory is sent once for all of them."""

    block: int
    view: TensorLayout
    requires_grad: bool


@dataclass(frozen=True)
class NestStructure:
    """The description of a nest without the values of its tensors.

    Each entry of `leaves` is a TensorMeta, a reference to an earlier leaf (Again), a Part of a
    block, or the pickled bytes of a value. `blocks` describes memory that several leaves share; it
    is sent last.
    """

    tree: Tree
    leaves: tuple[TensorMeta | RepeatedLeaf | SharedLeaf | bytes, ...]
    blocks: tuple[TensorMeta, ...] = ()
    metas: tuple[TensorMeta, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        tensors = tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))
        object.__setattr__(self, "metas", (*tensors, *self.blocks))

    def to_bytes(self) -> bytes:
        """Serialize the structure, for the header of a message."""
        return dumps((self.tree, self.leaves, self.blocks), "boundary")

    @classmethod
    def from_bytes(cls, data: bytes) -> "NestStructure":
        """Parse the header of a message."""
        return cls(*loads(data, "boundary"))


EMPTY = NestStructure(flatten(())[1], ())


def disassemble(
    nest: Nest, device: Device | None = None
) -> tuple[NestStructure, list[torch.Tensor]]:
    """Split a nest into its structure and its detached tensors, in leaf order.

    Lazy conjugation and negation are resolved. `device` is the device of this rank; None if it does
    not matter which tensors are on it. Raises ModelError for sparse, nested and quantized tensors.
    """
    told = device if device is not None and device.is_accelerator else None
    if isinstance(nest, torch.Tensor):
        elements = _elements(nest)
        on_device = told is None or told.holds(elements)
        described = (nest.shape, elements.stride(), nest.dtype, nest.requires_grad, on_device)
        return _single(*described), [elements]
    leaves, tree = flatten(nest)
    tensors: list[torch.Tensor] = []
    metas: list[TensorMeta | RepeatedLeaf | SharedLeaf | bytes] = []
    places: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            metas.append(_pickled(leaf))
            continue
        first = places.setdefault(id(leaf), place)
        if first != place:
            metas.append(RepeatedLeaf(first))
            continue
        elements = _elements(leaf)
        on_device = told is None or told.holds(elements)
        meta = _meta(leaf.shape, elements.stride(), leaf.dtype, leaf.requires_grad, on_device)
        metas.append(meta._replace(is_buffer=True) if is_buffer(leaf) else meta)
        tensors.append(elements)
    if len(tensors) > 1:
        return _with_blocks(tree, metas, tensors)
    return NestStructure(tree, tuple(metas)), tensors


def _with_blocks(
    tree: Tree,
    leaves: list[TensorMeta | RepeatedLeaf | SharedLeaf | bytes],
    tensors: list[torch.Tensor],
) -> tuple[NestStructure, list[torch.Tensor]]:
    """Return the structure and the tensors to send; memory that tensors share occurs once."""
    blocks = shared_blocks(tensors)
    if not blocks:
        return NestStructure(tree, tuple(leaves)), tensors
    own = [(place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, TensorMeta)]
    metas: list[TensorMeta] = []
    for number, block in enumerate(blocks):
        size = (block.memory.numel(),)
        for tensor, view in block.views.items():
            place, meta = own[tensor]
            leaves[place] = SharedLeaf(number, view, meta.requires_grad)
        metas.append(TensorMeta(size, torch.uint8, False, None, meta.on_device))
    in_blocks = {tensor for block in blocks for tensor in block.views}
    alone = [tensor for place, tensor in enumerate(tensors) if place not in in_blocks]
    travelling = [*alone, *(block.memory for block in blocks)]
    return NestStructure(tree, tuple(leaves), tuple(metas)), travelling


def packed(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the tensor in the memory layout of its metadata, copied only if necessary."""
    if meta.strides is None:
        return tensor.contiguous()
    if tensor.stride() == meta.strides:
        return tensor
    return tensor.new_empty_strided(meta.shape, meta.strides).copy_(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor unchanged, or a dense one as a flat view in memory order."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes, because backends do not support every dtype."""
    return flat(tensor).view(-1).view(torch.uint8)


def travelling_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides with which a tensor is sent; None if contiguous.

    A dense tensor keeps its strides; otherwise its dimensions keep their order in memory.
    """
    if strides == _strides_in_order(shape, range(len(shape))):
        return None
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    together = _strides_in_order(shape, order)
    # The stride of a dimension of size 1 has no effect and is kept.
    if all(shape[dim] < 2 or strides[dim] == together[dim] for dim in order):
        together = strides
    return None if together == _strides_in_order(shape, range(len(shape))) else together


def _strides_in_order(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides for dimensions listed from the slowest to the fastest."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def assemble(structure: NestStructure, tensors: list[torch.Tensor]) -> Nest:
    """Rebuild a nest; each tensor is a leaf and requires grad if the sender's did."""
    if structure.tree.kind is None and structure.metas:  # a single tensor
        return tensors[0].detach().requires_grad_(structure.metas[0].requires_grad)
    arrived, leaves = iter(tensors), list[Any]()
    for leaf in structure.leaves:
        if isinstance(leaf, TensorMeta):
            leaves.append(next(arrived).detach().requires_grad_(leaf.requires_grad))
            if leaf.is_buffer:
                mark_buffer(leaves[-1])
        elif isinstance(leaf, RepeatedLeaf):
            leaves.append(leaves[leaf.leaf])
        elif isinstance(leaf, SharedLeaf):
            memory = tensors[leaf.block - len(structure.blocks)]
            leaves.append(leaf.view.on(memory).requires_grad_(leaf.requires_grad))
        else:
            leaves.append(_value_of(leaf))
    return unflatten(leaves, structure.tree)


def as_received(nest: Nest) -> Nest:
    """Return a nest as another rank would receive it, without copying its memory."""
    if isinstance(nest, torch.Tensor):  # the most common case, for which no structure is built
        return _elements(nest).requires_grad_(nest.requires_grad)
    return assemble(*disassemble(nest))


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor without lazy conjugation or negation."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else tensor.dtype if tensor.is_quantized else None
        raise ModelError(
            f"boundary: expected plain (dense, strided) tensors between stages, got a "
            f"{kind or tensor.layout} tensor; let the layer return its components (indices and "
            f"values, or offsets), or put both layers into one stage"
        )
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    # Zero tensors that autograd creates lazily have no memory.
    return tensor.clone() if tensor._is_zerotensor() else tensor


def _pickled(value: object) -> bytes:
    if type(value) in _ATOMS:
        return pickle.dumps(value)
    return dumps(
        value,
        "boundary",
        hides=f"boundary: a layer returns a tensor within a {type(value).__name__}, through which "
        f"autograd cannot follow it to the next stage; return tensors in tuples, lists or dicts, "
        f"or register the class with torch.utils._pytree",
    )


def _value_of(leaf: bytes) -> Any:
    if len(leaf) <= _SHORT_BYTES:
        found = _atom(leaf)
        if found is not None:
            return found[0]
    return loads(leaf, "boundary")


@lru_cache(maxsize=MAX_STRUCTURES)
def _atom(leaf: bytes) -> tuple[Any] | None:
    """Return a pickled leaf's value, in a tuple, if its type is immutable; else None. Cached."""
    value = loads(leaf, "boundary")
    return (value,) if type(value) in _ATOMS else None


@lru_cache(maxsize=MAX_LAYOUTS)
def _single(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    on_device: bool,
) -> NestStructure:
    """Return the structure of a single tensor; cached, because most messages are one tensor."""
    return NestStructure(LEAF, (_meta(shape, strides, dtype, requires_grad, on_device),))


@lru_cache(maxsize=MAX_LAYOUTS)
def _meta(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    on_device: bool,
) -> TensorMeta:
    sizes = tuple(shape)
    layout = travelling_strides(sizes, strides)
    return TensorMeta(sizes, dtype, requires_grad, layout, on_device)


class StructureCache:
    """The structures known at one end of a channel, by number.

    Both ends number new structures in the order of the messages and delete the oldest ones in the
    same order, so that structures that change with every message do not fill the memory. The newest
    structure is kept, whatever its size.
    """

    def __init__(
        self, capacity: int = MAX_STRUCTURES, capacity_bytes: int = MAX_STRUCTURE_BYTES
    ) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._numbers: dict[NestStructure, int] = {}
        self._structures: dict[int, NestStructure] = {0: EMPTY}
        self._sizes: dict[int, int] = {}  # bytes of each structure, the oldest first
        self._size_bytes = 0
        self._next = 1

    def identify(self, structure: NestStructure) -> tuple[int, bytes]:
        """Return a structure's number, and its header if it is new to the other end, else b""."""
        if structure is EMPTY:
            return 0, b""
        known = self._numbers.get(structure)
        if known is not None:
            return known, b""
        header = structure.to_bytes()
        return self._add(structure, len(header)), header

    def learn(self, header: bytes) -> int:
        """Add the structure of a received header; return its number."""
        return self._add(NestStructure.from_bytes(header), len(header))

    def _add(self, structure: NestStructure, header_bytes: int) -> int:
        """Add a new structure and delete the oldest."""
        number = self._next
        self._next += 1
        self._numbers[structure] = number
        self._structures[number] = structure
        # Computed from values that both ends know, so that they delete the same structures.
        self._sizes[number] = header_bytes + _LEAF_BYTES * len(structure.leaves)
        self._size_bytes += self._sizes[number]
        while len(self._sizes) > 1 and (
            len(self._sizes) > self._capacity or self._size_bytes > self._capacity_bytes
        ):
            oldest = next(iter(self._sizes))
            self._size_bytes -= self._sizes.pop(oldest)
            self._numbers.pop(self._structures.pop(oldest), None)
        return number

    def __getitem__(self, number: int) -> NestStructure:
        """Return the structure with this number."""
        return self._structures[number]


class ExpectedStructure:
    """The structure to expect at one position of a channel, tracked by sender and receiver alike.

    Receives are posted for the expected structure: the first one, or one that occurred twice in a
    row, so that no buffers are posted for shapes that change at every step.
    """

    __slots__ = ("expected", "last", "metas")

    def __init__(self) -> None:
        self.expected: int | None = None
        self.last: int | None = None
        # Metadata of the expected structure, which a catalogue may delete before it is used.
        self.metas: tuple[TensorMeta, ...] = ()

    def saw(self, number: int, structure: NestStructure) -> None:
        """Record the structure of a message, and update the expected one."""
        self.expected = number if self.last in (None, number) else None
        self.metas = () if self.expected is None else structure.metas
        self.last = number
