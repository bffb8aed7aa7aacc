"""What travels over a channel: any nest of tensors, described by a structure.

A message is a fixed-size word, a header only when its structure is new to the channel, and the
tensors themselves. The word says which structure follows, so both ends know what to post.
"""

import io
import pickle
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from gpipe_hpc.comm.nests import LEAF, Nest, Tree, flatten, unflatten
from gpipe_hpc.errors import ModelError

WORD_LENGTH = 5
MAX_STRUCTURES = 256  # that a channel remembers


class Word(NamedTuple):
    """The fixed-size announcement of a message; sent as int64[5]."""

    serial: int  # position in the channel since its start: catches lost or doubled messages
    microbatch: int
    structure: int  # identity of the structure within the channel
    header_bytes: int  # 0: the receiver has this structure already
    num_samples: int  # 0: an empty micro-batch, nothing follows but what was posted


class TensorMeta(NamedTuple):
    """What a receiver must know of one tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Structure:
    """The shape of a nest without its tensors' values.

    `leaves` has one entry a leaf: a TensorMeta, or the pickled bytes of a value.
    """

    tree: Tree
    leaves: tuple[TensorMeta | bytes, ...]
    metas: tuple[TensorMeta, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        tensors = tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorMeta))
        object.__setattr__(self, "metas", tensors)

    def to_bytes(self) -> bytes:
        """Serialise for a header."""
        return pickle.dumps((self.tree, self.leaves))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Structure":
        """Read a header back."""
        return cls(*pickle.loads(data))


EMPTY = Structure(flatten(())[1], ())


def disassemble(nest: Nest) -> tuple[Structure, list[torch.Tensor]]:
    """Split a nest into its structure and its tensors, detached, in leaf order."""
    if isinstance(nest, torch.Tensor):
        return _single(nest.shape, nest.dtype, nest.requires_grad), [nest.detach()]
    leaves, tree = flatten(nest)
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    described = tuple(
        _meta(leaf) if isinstance(leaf, torch.Tensor) else _pickled(leaf) for leaf in leaves
    )
    return Structure(tree, described), tensors


def assemble(structure: Structure, tensors: list[torch.Tensor]) -> Nest:
    """Rebuild a nest; each tensor is a leaf that requires grad where the sender's did."""
    if structure.tree.kind is None and structure.metas:  # one tensor alone
        return tensors[0].detach().requires_grad_(structure.metas[0].requires_grad)
    arrived = iter(tensors)
    leaves = [
        next(arrived).detach().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, TensorMeta)
        else pickle.loads(leaf)
        for leaf in structure.leaves
    ]
    return unflatten(leaves, structure.tree)


class _ValuePickler(pickle.Pickler):
    """Pickle a value; a tensor within it would lose its gradient in silence."""

    def persistent_id(self, obj: object) -> None:
        """Refuse tensors."""
        if isinstance(obj, torch.Tensor):
            raise ModelError("a tensor")


def _pickled(value: object) -> bytes:
    stream = io.BytesIO()
    try:
        _ValuePickler(stream).dump(value)
    except ModelError as error:
        raise ModelError(
            f"boundary: expected tensors in tuples, lists and dicts, got one hidden in a "
            f"{type(value).__name__}, where autograd cannot follow it to the next stage; let the "
            f"layer return a dict, or register the class with torch.utils._pytree"
        ) from error
    return stream.getvalue()


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


@lru_cache(maxsize=MAX_STRUCTURES)
def _single(shape: torch.Size, dtype: torch.dtype, requires_grad: bool) -> Structure:
    """Return the structure of a tensor alone, made once: most messages are one."""
    return Structure(LEAF, (TensorMeta(tuple(shape), dtype, requires_grad),))


class Catalogue:
    """The structures that one end of a channel knows, by number.

    Both ends number new structures in the order of the messages that bring them, and forget the
    oldest in the same order: values that change with every message must not fill the memory.
    """

    def __init__(self, capacity: int = MAX_STRUCTURES) -> None:
        self._capacity = capacity
        self._numbers: dict[Structure, int] = {}
        self._structures: dict[int, Structure] = {0: EMPTY}
        self._next = 1

    def identify(self, structure: Structure) -> tuple[int, bytes]:
        """Return a structure's number, and its header if the other end lacks it."""
        if structure is EMPTY:
            return 0, b""
        known = self._numbers.get(structure)
        if known is not None:
            return known, b""
        return self.learn(structure), structure.to_bytes()

    def learn(self, structure: Structure) -> int:
        """Number a new structure and forget the oldest."""
        number = self._next
        self._next += 1
        self._numbers[structure] = number
        self._structures[number] = structure
        if len(self._numbers) > self._capacity:
            oldest = next(iter(self._numbers))
            del self._structures[self._numbers.pop(oldest)]
        return number

    def __getitem__(self, number: int) -> Structure:
        """Return the structure of a number."""
        return self._structures[number]


class Slot:
    """What both ends of a channel remember of one micro-batch's place in it.

    Receives are posted for the expected structure. It is expected once it came twice in a row
    (or came first), so that shapes which change at every step are never posted in vain.
    """

    __slots__ = ("expected", "last", "metas")

    def __init__(self) -> None:
        self.expected: int | None = None
        self.last: int | None = None
        self.metas: tuple[TensorMeta, ...] = ()  # of the expected one, also once it is forgotten

    def saw(self, number: int, structure: Structure) -> None:
        """Note the structure of a message that has passed."""
        self.expected = number if self.last in (None, number) else None
        self.metas = () if self.expected is None else structure.metas
        self.last = number
