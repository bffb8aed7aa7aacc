"""The parts of a flat tensor that the ranks of a group hold, one behind the other."""

from collections.abc import Sequence

import torch

from gpipe_hpc.comm.collectives.plan import even_counts
from gpipe_hpc.errors import ConfigError


def shards(whole: torch.Tensor, counts: Sequence[int] | None, size: int) -> list[torch.Tensor]:
    """Return the views of flat `whole` that are the shards of `size` ranks, in their order.

    `counts`: of elements; None: as even as can be, the longer ones first. Raises ConfigError.
    """
    return list(torch.split(whole, list(checked_counts(whole, counts, size))))


def checked_counts(whole: torch.Tensor, counts: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return the number of elements of each rank's shard; ConfigError if they do not fit."""
    if whole.dim() != 1 or not whole.is_contiguous():
        raise ConfigError(
            f"shards: expected a flat contiguous tensor, got shape {tuple(whole.shape)} with "
            f"strides {whole.stride()}; pass a flat buffer"
        )
    if counts is None:
        return even_counts(whole.numel(), size)
    if len(counts) != size or min(counts) < 0 or sum(counts) != whole.numel():
        raise ConfigError(
            f"shards: expected {size} counts, none negative, with the sum {whole.numel()}, got "
            f"{len(counts)} with the sum {sum(counts)}: {list(counts)[:16]}; give one for each rank"
        )
    return tuple(counts)
