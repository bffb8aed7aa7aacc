"""The consecutive parts of a flat tensor that belong to the ranks of a group."""

from collections.abc import Sequence

import torch

from gpipe_hpc.comm.collectives.plan import even_counts
from gpipe_hpc.errors import ConfigError


def shards(whole: torch.Tensor, counts: Sequence[int] | None, size: int) -> list[torch.Tensor]:
    """Return views of the shards of flat `whole` for `size` ranks, in rank order.

    `counts` gives the number of elements of each shard; by default the shards are as equal as
    possible, the longer ones first. Raises ConfigError if the counts do not add up to the length of
    `whole`.
    """
    return list(torch.split(whole, list(checked_counts(whole, counts, size))))


def checked_counts(whole: torch.Tensor, counts: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return the number of elements of each shard; ConfigError if they do not add up to `whole`."""
    if whole.dim() != 1 or not whole.is_contiguous():
        raise ConfigError(
            f"shards: expected a flat contiguous tensor, got shape {tuple(whole.shape)} with "
            f"strides {whole.stride()}; pass a flat buffer"
        )
    if counts is None:
        return even_counts(whole.numel(), size)
    if len(counts) != size or min(counts) < 0 or sum(counts) != whole.numel():
        raise ConfigError(
            f"shards: expected {size} non-negative counts with sum {whole.numel()}, got "
            f"{len(counts)} with sum {sum(counts)}: {list(counts)[:16]}; pass one for each rank"
        )
    return tuple(counts)
