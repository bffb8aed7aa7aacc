"""Cutting a batch into micro-batches, and putting outputs together again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpipe_hpc.comm.nests import Nest, flatten, tensors_of, unflatten
from gpipe_hpc.errors import DataError


class Pieces(NamedTuple):
    """A batch cut into micro-batches, and how many samples each has."""

    nests: list[Nest]
    sizes: list[int]

    @classmethod
    def of(cls, batch: Nest, num_microbatches: int, what: str) -> "Pieces":
        """Cut this replica's share; DataError if it has no samples to cut."""
        total = num_samples_of(batch, what)
        slices = [share_of(total, num_microbatches, m, 1) for m in range(num_microbatches)]
        sizes = [piece.stop - piece.start for piece in slices]
        return cls(cut(batch, num_microbatches, what), sizes)


def num_samples_of(batch: Nest, what: str) -> int:
    """Return the leading dimension that all tensors of a nest share.

    Raises DataError if there is no tensor with a leading dimension, or they disagree.
    """
    sizes = {len(leaf) for leaf in _batched(batch)}
    if len(sizes) == 1:
        return sizes.pop()
    if not sizes:
        raise DataError(
            f"{what}: expected a nest with at least one tensor of shape (samples, ...), got "
            f"{type(batch).__name__}; put the samples in the first dimension"
        )
    raise DataError(
        f"{what}: expected tensors with one common first dimension (samples), got {sorted(sizes)}"
    )


def share_of(num_samples: int, pieces: int, first: int, count: int) -> slice:
    """Return where pieces first..first+count-1 of `num_samples` cut in `pieces` lie.

    The cut is `torch.tensor_split`'s: the first num_samples % pieces have one sample more.
    """
    size, extra = divmod(num_samples, pieces)

    def start(piece: int) -> int:
        return piece * size + min(piece, extra)

    return slice(start(first), start(first + count))


def cut(batch: Nest, num_microbatches: int, what: str) -> list[Nest]:
    """Cut a nest into micro-batches along the first dimension of its tensors.

    Zero-dimensional tensors and values that are no tensors go to every micro-batch.
    """
    total = num_samples_of(batch, what)
    leaves, tree = flatten(batch)
    slices = [share_of(total, num_microbatches, m, 1) for m in range(num_microbatches)]

    def piece(leaf: Any, where: slice) -> Any:
        return leaf[where] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return [unflatten([piece(leaf, w) for leaf in leaves], tree) for w in slices]


def join(outputs: Sequence[Nest]) -> Nest:
    """Put the outputs of micro-batches together along the first dimension, in their order.

    Zero-dimensional tensors are stacked; values that are no tensors become a list, one a
    micro-batch, unless all are None.
    """
    if not outputs:
        return None
    flat = [flatten(output) for output in outputs]
    tree = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten([_join_leaf(list(column)) for column in columns], tree)


def _join_leaf(column: list[Any]) -> Any:
    if all(isinstance(leaf, torch.Tensor) for leaf in column):
        return torch.stack(column) if column[0].dim() == 0 else torch.cat(column)
    return None if all(leaf is None for leaf in column) else column


def _batched(batch: Nest) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(batch) if tensor.dim() > 0]
