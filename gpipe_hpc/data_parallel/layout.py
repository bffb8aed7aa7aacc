"""Where parameters lie in flat buffers, and which elements each copy of a stage owns.

Arithmetic alone: the engine makes its buckets by these functions, and the planner predicts their
memory by the same ones.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import nn

Buckets = tuple[tuple[str, ...], ...]
"""The parameters of each bucket of a stage, by global name, in the order of their memory."""

ALIGNED: Final = 16
"""Elements: each tensor in a flat buffer begins at a multiple of so many.

A tensor of its own begins at such an address, and kernels then load several numbers at once. At any
other address they add the numbers up in another order: on a GPU the norm of a gradient had another
last bit in a bucket than alone.
"""


class GradientSize(NamedTuple):
    """Number of elements and dtype of a parameter's gradient."""

    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the memory of the gradient."""
        return self.num_elements * self.dtype.itemsize


def fill_buckets(parameters: Mapping[str, GradientSize], bucket_bytes: float) -> Buckets:
    """Divide a stage's parameters into buckets of one dtype and at most `bucket_bytes` each.

    A backward makes the gradients of the last layers first, so buckets are filled from the end of
    the model, and numbered in the order in which their last gradient is complete. A parameter of
    more than `bucket_bytes` has a bucket of its own. Padding between tensors (`ALIGNED`) does not
    count.

    Args:
        parameters: Sizes by global name, in the model's order.
        bucket_bytes: Largest size of a bucket.
    """
    filled: list[tuple[int, list[str]]] = []
    open_buckets: dict[torch.dtype, tuple[list[str], int]] = {}
    for at, (name, size) in enumerate(reversed(list(parameters.items()))):
        names, num_bytes = open_buckets.get(size.dtype, ([], 0))
        if names and num_bytes + size.num_bytes > bucket_bytes:
            names, num_bytes = [], 0
        if not names:
            filled.append((at, names))
        names.append(name)
        open_buckets[size.dtype] = names, num_bytes + size.num_bytes
        index = next(i for i in reversed(range(len(filled))) if filled[i][1] is names)
        filled[index] = at, names  # a bucket is complete with its last gradient
    return tuple(tuple(names) for _, names in sorted(filled, key=lambda each: each[0]))


class BucketItem(NamedTuple):
    """A parameter in a bucket: global name, shape, and elements `start` to `stop` of the buffer.

    `is_used`: whether a micro-batch of this replica used it in this step.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    is_used: bool = True


class ShardSpan(NamedTuple):
    """Elements of a flattened parameter that the copy of its stage at `position` owns."""

    position: int
    start: int
    stop: int


class FlatLayout:
    """Parameters one after the other in a flat buffer, divided into one equal shard per copy.

    The buffer is padded so that shards are equal. With few elements the last copies own none.

    Args:
        sizes: Elements of each parameter, in the order of their memory.
        num_copies: Copies of the stage that share the buffer.
    """

    def __init__(self, sizes: Mapping[str, int], num_copies: int = 1) -> None:
        self.sizes = dict(sizes)
        self.offsets: dict[str, int] = {}
        self.num_elements = 0
        for name, size in sizes.items():
            self.offsets[name] = -(-self.num_elements // ALIGNED) * ALIGNED
            self.num_elements = self.offsets[name] + size
        self.shard_elements = -(-self.num_elements // num_copies)
        self.padded_elements = self.shard_elements * num_copies

    def span(self, position: int) -> tuple[int, int]:
        """Return where the shard of the copy at `position` begins and ends, without padding."""
        start = min(position * self.shard_elements, self.num_elements)
        return start, min(start + self.shard_elements, self.num_elements)

    def slices(self, position: int) -> Iterator[tuple[str, int, int]]:
        """Yield name, start and stop of the elements of each parameter in the shard of a copy.

        A parameter without elements is in no shard.
        """
        first, last = self.span(position)
        for name, size in self.sizes.items():
            offset = self.offsets[name]
            start, stop = max(first - offset, 0), min(last - offset, size)
            if start < stop:
                yield name, start, stop

    def spans_of(self, name: str) -> list[ShardSpan]:
        """Return what each copy owns of a parameter with elements, the first elements first.

        Every copy computes the same, without communication.
        """
        first, last = self.offsets[name], self.offsets[name] + self.sizes[name]
        assert first < last, f"{name} has no elements, so no copy owns any"
        owners = range(first // self.shard_elements, (last - 1) // self.shard_elements + 1)
        spans = ((position, self.span(position)) for position in owners)
        return [
            ShardSpan(position, max(begin, first) - first, min(end, last) - first)
            for position, (begin, end) in spans
        ]


class OwnedParameter(NamedTuple):
    """What this rank's optimizer updates of a parameter: all of it, or a span of its elements.

    `parameter` is what an optimizer steps on and keeps state for: `whole` itself, or a
    one-dimensional view of the elements of `whole` from `start` on. `layout` and `name`: where the
    parameter lies in a sharded bucket, if it does.
    """

    parameter: nn.Parameter
    whole: nn.Parameter
    start: int = 0
    layout: FlatLayout | None = None
    name: str = ""

    @classmethod
    def full(cls, parameter: nn.Parameter) -> "OwnedParameter":
        """Return that this rank updates all elements of a parameter."""
        return cls(parameter, parameter)

    @property
    def spans(self) -> list[ShardSpan]:
        """Return what each copy of the stage owns of a parameter in a sharded bucket.

        Not stored: a parameter may lie on thousands of ranks.
        """
        assert self.layout is not None, "only parameters in a sharded bucket have spans"
        return self.layout.spans_of(self.name)

    @property
    def stop(self) -> int:
        """Return where the elements that this rank owns end."""
        return self.start + self.parameter.numel()

    @property
    def is_view(self) -> bool:
        """Return whether `parameter` is a view of elements of `whole`, not `whole` itself."""
        return self.parameter is not self.whole

    @property
    def is_part(self) -> bool:
        """Return whether other ranks own some of the elements."""
        return self.parameter.numel() < self.whole.numel()

    def is_elementwise(self, state: torch.Tensor) -> bool:
        """Return whether a state of the optimizer has one number for each owned element."""
        return self.is_view and state.shape == self.parameter.shape

    def part_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a state of the whole parameter, a view if possible."""
        if self.is_view and state.shape == self.whole.shape:
            return state.reshape(-1)[self.start : self.stop]
        return state


def in_owner_order(sizes: Mapping[str, int]) -> list[str]:
    """Return the names of tensors, the largest first, so that the last ones even out the loads."""
    return sorted(sizes, key=lambda name: -sizes[name])


def assign_owners(
    sizes: Mapping[str, int], trained: Mapping[str, bool], num_copies: int
) -> dict[str, int]:
    """Return the owner of each whole tensor, as fairscale's OSS assigns them.

    Tensors go, `in_owner_order`, to the copy that has least so far; a frozen one counts as one
    element. A test compares this with OSS.
    """
    load = [0] * num_copies
    owner: dict[str, int] = {}
    for name in in_owner_order(sizes):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name] if trained[name] else 1
    return owner
