"""Into which buckets the gradients of a stage are gathered before they are summed."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

Buckets = tuple[tuple[str, ...], ...]
"""The parameters of each bucket of a stage, by global name, in the order of their memory."""


class Sized(NamedTuple):
    """What a parameter's gradient is made of."""

    num_elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return how much memory it takes."""
        return self.num_elements * self.dtype.itemsize


def fill_buckets(parameters: Mapping[str, Sized], bucket_bytes: float) -> Buckets:
    """Divide a stage's parameters, given in the model's order, into buckets.

    A backward makes the gradients of the last layers first, so buckets are filled from behind; they
    are numbered in the order in which they are complete. A bucket has one dtype and gradients of at
    most `bucket_bytes`, or one that is larger; what keeps them aligned (`ALIGNED`) is beside that.
    """
    filled: list[tuple[int, list[str]]] = []
    open_ones: dict[torch.dtype, tuple[list[str], int]] = {}
    for at, (name, sized) in enumerate(reversed(list(parameters.items()))):
        names, size = open_ones.get(sized.dtype, ([], 0))
        if names and size + sized.num_bytes > bucket_bytes:
            names, size = [], 0
        if not names:
            filled.append((at, names))
        names.append(name)
        open_ones[sized.dtype] = names, size + sized.num_bytes
        index = next(i for i in reversed(range(len(filled))) if filled[i][1] is names)
        filled[index] = at, names  # complete with its last
    return tuple(tuple(names) for _, names in sorted(filled, key=lambda each: each[0]))


def bucket_counts(buckets: Sequence[Buckets]) -> dict[int, int]:
    """Return how many buckets each stage has that has any."""
    return {stage: len(each) for stage, each in enumerate(buckets) if each}
