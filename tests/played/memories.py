"""What is known of each storage: whose memory it is, and who has used which bytes of it last."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.played.clocks import Line
from tests.played.places import Where


class Kind(Enum):
    """Whose memory a storage is."""

    HOST = "host"
    PINNED = "pinned"
    DEVICE = "device"
    ELSEWHERE = "elsewhere"  # of another device than the rank's
    DATA = "data"  # Python's numbers: of the host, or brought from there by torch without a word
    UNKNOWN = "unknown"  # made within an operator of torch, which may mean either


class Span(NamedTuple):
    """Bytes of a storage, from `start` up to `stop`."""

    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        return self.start < other.stop and other.start < self.stop

    def holds(self, other: "Span") -> bool:
        return self.start <= other.start and other.stop <= self.stop


class Use(NamedTuple):
    """What a work of a stream does to bytes of a storage."""

    line: int
    time: int
    span: Span
    is_write: bool
    operator: str
    where: Where

    def __str__(self) -> str:
        verb = "writes" if self.is_write else "reads"
        return f"{self.operator} at {self.where} {verb} it on stream {self.line}"


@dataclass(eq=False)
class Memory:
    """One storage. `owner`: the stream that was current when it was made, for the device's.

    `lent`: by number, the streams that the owner waits for, as far as they are when it is freed.
    """

    kind: Kind
    size: int
    owner: Line | None = None
    born: Use | None = None
    uses: dict[tuple[int, Span, bool], Use] = field(default_factory=dict)
    lent: dict[int, Line] = field(default_factory=dict)

    def conflicts(self, use: Use) -> Iterator[Use]:
        """Yield the earlier uses that must be over before this one."""
        for earlier in self.uses.values():
            if (earlier.is_write or use.is_write) and earlier.span.meets(use.span):
                yield earlier

    def note(self, use: Use) -> None:
        """Note a use that is ordered behind all it conflicts with."""
        if use.is_write:
            covered = [key for key, old in self.uses.items() if use.span.holds(old.span)]
            for key in covered:
                del self.uses[key]
        self.uses[use.line, use.span, use.is_write] = use


class Freed(NamedTuple):
    """Memory that its owner's stream may hand out again, and uses that may not be over."""

    uses: list[Use]
    where: Where


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor consists of; none if it has no memory here."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


def storage_of(tensor: Tensor) -> Any:
    """Return the storage; the same object as long as it lives, None without memory of its own."""
    if tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def span_of(tensor: Tensor) -> Span:
    """Return the bytes that a tensor's elements lie in; between them may be others."""
    size = tensor.element_size()
    start = tensor.storage_offset()
    last = start
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if length == 0:
            return Span(0, 0)
        last += (length - 1) * stride
    return Span(start * size, (last + 1) * size)
