"""Positions of parameters in flat buffers, and the elements that each replica owns.

Arithmetic only: the engine allocates its buckets with these functions, and the planner predicts
their memory with the same ones.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import nn

Buckets = tuple[tuple[str, ...], ...]
"""Global names of the parameters in each bucket of a stage, in the order of their memory."""

ALIGNED: Final = 16
"""Alignment in elements of tensors in a flat buffer.

Separate tensors begin at such addresses, where kernels load several numbers at once. At other
addresses, kernels add numbers in another order: on a GPU, the norm of a gradient in a bucket
differed in the last bit from that of a separate tensor.
"""


class GradientSize(NamedTuple):
    """Number of elements and dtype of a parameter's gradient."""

    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size of the gradient in bytes."""
        return self.num_elements * self.dtype.itemsize


def fill_buckets(parameters: Mapping[str, GradientSize], bucket_bytes: float) -> Buckets:
    """Assign the parameters of a stage to buckets of one dtype and at most `bucket_bytes` each.

    A backward pass computes the gradients of the last layers first. So buckets are filled from the
    end of the model and numbered in the order in which they are complete. A parameter larger than
    `bucket_bytes` has a bucket of its own. Padding between tensors (`ALIGNED`) does not count.

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
    """A parameter in a bucket.

    Args:
        name: Global name.
        shape: Shape of the parameter.
        start: First element in the buffer.
        stop: End of the elements in the buffer.
        is_used: Whether a micro-batch of this replica used the parameter in this step.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    is_used: bool = True


class ShardSpan(NamedTuple):
    """Elements of a flattened parameter that the replica at `position` owns."""

    position: int
    start: int
    stop: int


class FlatLayout:
    """Parameters in consecutive parts of a flat buffer that is divided into equal shards.

    There is one shard for each replica. The buffer is padded so that shards are equal; with few
    elements, the last replicas own none.

    Args:
        sizes: Number of elements of each parameter, in the order of their memory.
        num_copies: Number of replicas that share the buffer.
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
        """Return the first element and the end of a replica's shard, without padding."""
        start = min(position * self.shard_elements, self.num_elements)
        return start, min(start + self.shard_elements, self.num_elements)

    def slices(self, position: int) -> Iterator[tuple[str, int, int]]:
        """Yield (name, start, stop) for the elements of each parameter in a replica's shard.

        Parameters without elements are in no shard.
        """
        first, last = self.span(position)
        for name, size in self.sizes.items():
            offset = self.offsets[name]
            start, stop = max(first - offset, 0), min(last - offset, size)
            if start < stop:
                yield name, start, stop

    def spans_of(self, name: str) -> list[ShardSpan]:
        """Return the elements of a parameter that each replica owns, in order.

        Computed without communication; the result is equal on all replicas.
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
    """The elements of a parameter that this rank's optimizer updates: all, or a span.

    Args:
        parameter: The tensor that the optimizer updates: `whole`, or a one-dimensional view of its
            elements.
        whole: The parameter of the model.
        start: First element of the view.
        layout: Layout of the sharded bucket that contains the parameter; None if it is not sharded.
        name: Name of the parameter in that layout.
    """

    parameter: nn.Parameter
    whole: nn.Parameter
    start: int = 0
    layout: FlatLayout | None = None
    name: str = ""

    @classmethod
    def full(cls, parameter: nn.Parameter) -> "OwnedParameter":
        """Return an instance for a parameter that this rank updates as a whole."""
        return cls(parameter, parameter)

    @property
    def spans(self) -> list[ShardSpan]:
        """Return the span that each replica owns of a parameter in a sharded bucket.

        Computed each time: a parameter may be divided over thousands of ranks.
        """
        assert self.layout is not None, "only parameters in a sharded bucket have spans"
        return self.layout.spans_of(self.name)

    @property
    def stop(self) -> int:
        """Return the end of the elements that this rank owns."""
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
        """Return whether a tensor of optimizer state has one number for each owned element."""
        return self.is_view and state.shape == self.parameter.shape

    def part_of(self, state: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of an optimizer state of the whole parameter."""
        if self.is_view and state.shape == self.whole.shape:
            return state.reshape(-1)[self.start : self.stop]
        return state


def in_owner_order(sizes: Mapping[str, int]) -> list[str]:
    """Return the names of tensors by decreasing size, the order in which owners are assigned."""
    return sorted(sizes, key=lambda name: -sizes[name])


def assign_owners(sizes: Mapping[str, int], num_copies: int) -> dict[str, int]:
    """Return the owner of each whole tensor, assigned as fairscale's OSS does.

    Tensors are assigned, `in_owner_order`, to the replica with the least load so far. A test
    compares the result with OSS, for tensors that are trained.
    """
    load = [0] * num_copies
    owner: dict[str, int] = {}
    for name in in_owner_order(sizes):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner
