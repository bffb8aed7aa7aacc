"""A sum of numbers that travel in a code of fewer bits, each copy adding up a shard."""

from typing import Protocol

import torch

from gpipe_hpc.comm.collectives.plan import even_counts
from gpipe_hpc.engine.outer.compress.compressor import Stateless, Task
from gpipe_hpc.engine.outer.compress.messages import exchange
from gpipe_hpc.models import mix64


class Code(Protocol):
    """Writes numbers in fewer bits."""

    def num_bytes(self, count: int) -> int:
        """Return how many bytes the code of so many numbers takes; none for none."""

    def encode(self, numbers: torch.Tensor, key: int) -> torch.Tensor:
        """Return the code of float[n] as uint8[num_bytes(n)]; `key`: of its randomness."""

    def decode(self, code: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers that a code means, float[count] of `dtype`."""


class Coded(Stateless):
    """Exchange coded shards, add them in float32 or wider, and gather the coded sums.

    What travels is coded twice: on its way to the copy that adds up a shard, and as that shard's
    sum. The sender keeps what the first code lost, the one that added keeps what the second lost.
    A rank sends 2 (n-1) shards of 1/n of the numbers, n the number of copies: as many messages as
    a ring, each in the bits of the code.
    """

    def __init__(self, code: Code) -> None:
        self._code = code

    def sum(self, own: torch.Tensor, task: Task) -> torch.Tensor:
        """Return the coded sum; see `Compressor`."""
        group, code = task.group, self._code
        size, position = group.size, group.position
        counts = even_counts(own.numel(), size)
        shards = torch.split(own, list(counts))
        others = [each for each in range(size) if each != position]
        codes = {at: code.encode(shards[at], _key(task.key, at)) for at in others}
        for at in others:
            shards[at].sub_(code.decode(codes[at], counts[at], own.dtype))
        mine = counts[position]
        came = exchange(group, codes, dict.fromkeys(others, code.num_bytes(mine)))
        terms = {at: code.decode(each, mine, own.dtype) for at, each in came.items()}
        total = torch.zeros_like(shards[position])
        for at in range(size):
            total += terms[at] if at in terms else shards[position]
        summed = code.encode(total, _key(task.key, size))
        sums = exchange(
            group,
            dict.fromkeys(others, summed),
            {at: code.num_bytes(counts[at]) for at in others},
        )
        sums[position] = summed
        result = torch.cat([code.decode(sums[at], counts[at], own.dtype) for at in range(size)])
        torch.sub(total, torch.split(result, list(counts))[position], out=shards[position])
        return result


def _key(key: int, number: int) -> int:
    return mix64(mix64(key) + number & 2**64 - 1) >> 1
