"""PowerSGD: matrices as products of low rank (Vogels et al., 2019, arXiv 1905.13727).

Legend: M a gradient as a matrix of n rows (its first dimension) and m columns, r its rank.

Each copy multiplies its M by Q, m x r, which is the same on all; the products are summed and made
orthonormal: P, n x r. The sum of the copies' ``M^T P`` is the next Q, with which the next step
starts; ``P Q^T`` is the sum of what the copies' M have in the space of P. A copy keeps the rest of
its own: ``M - P P^T M``.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import torch

from gpipe_hpc.comm.collectives.menu import start_ring_all_reduce
from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.outer.compress.compressor import Task
from gpipe_hpc.engine.outer.items import Item
from gpipe_hpc.errors import ConfigError


class _Matrix(NamedTuple):
    """A parameter of a bucket as a matrix, `rank` the columns of its two factors."""

    item: Item
    rows: int
    columns: int
    rank: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of it in the bucket's buffer."""
        return flat[self.item.start : self.item.stop].view(self.rows, self.columns)


class PowerSGD:
    """Sum factors of matrices; vectors, and matrices that factors would not shorten, are whole.

    What is summed: ``r (n + m)`` numbers a matrix. The sums run along a ring of ours, which leaves
    the same bits on all copies; the orthonormal P is computed on each, so copies must be computers
    of one kind.
    """

    def __init__(self, rank: int) -> None:
        if rank < 1:
            raise ConfigError(
                f"outer.powersgd_rank: expected 1 or more, got {rank}; 1 to 4 are usual"
            )
        self._rank = rank
        self._starts: dict[str, torch.Tensor] = {}

    def sum(self, own: torch.Tensor, task: Task) -> torch.Tensor:
        """Return the sum of low rank; see `Compressor`."""
        group = task.group
        matrices = [found for item in task.items if (found := self._matrix(item))]
        taken = {found.item.name for found in matrices}
        whole = [item for item in task.items if item.name not in taken]
        starts = [self._start(each, own) for each in matrices]
        products = [each.of(own) @ start for each, start in zip(matrices, starts, strict=True)]
        vectors = [own[item.start : item.stop] for item in whole]
        summed = _sum([*products, *vectors], group)
        sides = [torch.linalg.qr(each).Q for each in summed[: len(matrices)]]
        mine = [each.of(own).T @ side for each, side in zip(matrices, sides, strict=True)]
        others = _sum(mine, group)
        total = torch.zeros_like(own)
        for item, vector in zip(whole, summed[len(matrices) :], strict=True):
            total[item.start : item.stop] = vector
            own[item.start : item.stop] = 0
        for each, side, part, both in zip(matrices, sides, mine, others, strict=True):
            torch.mm(side, both.T, out=each.of(total))
            each.of(own).sub_(side @ part.T)
            # Nothing can be started from gradients of zeros, or from an overflow.
            is_good = torch.isfinite(both).all() & (both != 0).any()
            self._starts[each.item.name] = torch.where(is_good, both, self._start(each, own))
        return total

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return Q of each matrix."""
        return self._starts

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Start from these Q."""
        self._starts = dict(state)

    def _matrix(self, item: Item) -> _Matrix | None:
        """Return the parameter as a matrix; None if it is none, or short enough."""
        if len(item.shape) < 2:
            return None
        rows, columns = item.shape[0], item.shape[1:].numel()
        rank = min(self._rank, rows, columns)
        if rank * (rows + columns) >= rows * columns:
            return None
        return _Matrix(item, rows, columns, rank)

    def _start(self, each: _Matrix, like: torch.Tensor) -> torch.Tensor:
        """Return the Q to start from: the last one, or one drawn alike on all copies."""
        name, shape = each.item.name, (each.columns, each.rank)
        kept = self._starts.get(name)
        if kept is None or kept.shape != shape:
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            kept = torch.randn(shape, generator=generator, dtype=torch.float64)
        return kept.to(like)


def _sum(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return the sums of tensors over the group, in their shapes."""
    if not parts:
        return []
    flat = torch.cat([part.reshape(-1) for part in parts])
    start_ring_all_reduce(group, flat).wait()
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.numel())
    return [
        flat[start:stop].view(part.shape)
        for part, (start, stop) in zip(parts, pairwise(ends), strict=True)
    ]
