"""State of each storage: its owner, and the last uses of its bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.simulated.clocks import Line
from tests.simulated.locations import Where


class Kind(Enum):
    """The owner of a storage: host, pinned host or device."""

    HOST = "host"
    PINNED = "pinned"
    DEVICE = "device"
    ELSEWHERE = "elsewhere"  # of another device than the rank's
    DATA = "data"  # Python's numbers: of the host, or brought from there by torch without a word
    UNKNOWN = "unknown"  # made within an operator of torch, which may mean either


class Span(NamedTuple):
    """A range of bytes of a storage."""

    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        return self.start < other.stop and other.start < self.stop

    def holds(self, other: "Span") -> bool:
        return self.start <= other.start and other.stop <= self.stop


class Use(NamedTuple):
    """The access of a stream's work to bytes of a storage."""

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
    """One storage; `owner` is the stream that was current when device memory was allocated.

    `lent` maps streams to the number of the work up to which the owner waits when the storage is
    freed.
    """

    kind: Kind
    size: int
    owner: Line | None = None
    born: Use | None = None
    uses: dict[tuple[int, Span, bool], Use] = field(default_factory=dict)
    lent: dict[int, Line] = field(default_factory=dict)

    def conflicts(self, use: Use) -> Iterator[Use]:
        """Yield the earlier uses that must complete before a new one."""
        for earlier in self.uses.values():
            if (earlier.is_write or use.is_write) and earlier.span.meets(use.span):
                yield earlier

    def note(self, use: Use) -> None:
        """Record a use that is ordered after all conflicting ones."""
        if use.is_write:
            covered = [key for key, old in self.uses.items() if use.span.holds(old.span)]
            for key in covered:
                del self.uses[key]
        self.uses[use.line, use.span, use.is_write] = use


class Freed(NamedTuple):
    """Memory that its owner's stream may reuse, and uses that may be incomplete."""

    uses: list[Use]
    where: Where


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor consists of; empty if it has no memory."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor]


def storage_of(tensor: Tensor) -> Any:
    """Return the storage, one object for its lifetime, or None for a tensor without memory."""
    if tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def span_of(tensor: Tensor) -> Span:
    """Return the range of bytes that contains a tensor's elements, possibly with gaps."""
    size = tensor.element_size()
    start = tensor.storage_offset()
    last = start
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if length == 0:
            return Span(0, 0)
        last += (length - 1) * stride
    return Span(start * size, (last + 1) * size)
