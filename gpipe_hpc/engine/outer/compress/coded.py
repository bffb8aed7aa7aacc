"""A sum of numbers that travel in a code of fewer bits, each copy adding up a shard."""

from typing import Protocol

import torch

from gpipe_hpc.comm.collectives.plan import even_counts
from gpipe_hpc.engine.outer.compress.compressor import Stateless, Task
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
    A rank sends 2 (n-1) shards of 1/n of the numbers, n the number of copies: as many as a ring,
    each in the bits of the code. Where copies are not all connected, codes go by way of others.
    """

    def __init__(self, code: Code) -> None:
        self._code = code

    def sum(self, own: torch.Tensor, task: Task) -> torch.Tensor:
        """Return the coded sum; see `Compressor`."""
        group, code = task.group, self._code
        size, position = group.size, group.position
        counts = even_counts(own.numel(), size)
        shards = torch.split(own, list(counts))
        sizes = [code.num_bytes(count) for count in counts]
        codes = torch.empty(sum(sizes), dtype=torch.uint8, device=own.device)
        parts = torch.split(codes, sizes)
        for at in range(size):
            if at != position:
                coded = code.encode(shards[at], _key(task.key, at))
                parts[at].copy_(coded)
                shards[at].sub_(code.decode(coded, counts[at], own.dtype))
        came = group.all_to_all(codes, sizes)
        total = torch.zeros_like(shards[position])
        for at in range(size):
            is_own = at == position
            total += shards[at] if is_own else _decoded(code, came[at], len(total), own.dtype)
        parts[position].copy_(code.encode(total, _key(task.key, size)))
        group.all_gather(codes, sizes)
        numbered = zip(parts, counts, strict=True)
        result = torch.cat([_decoded(code, part, count, own.dtype) for part, count in numbered])
        torch.sub(total, torch.split(result, list(counts))[position], out=shards[position])
        return result


def _decoded(code: Code, part: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a code means that lies anywhere in a message; decoders look at whole words."""
    return code.decode(part.clone(), count, dtype)


def _key(key: int, number: int) -> int:
    return mix64(mix64(key) + number & 2**64 - 1) >> 1
