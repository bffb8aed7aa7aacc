"""Which samples make up which global batch: a pure function of the position in the run.

The position is the number of samples consumed since the start. It alone goes into a checkpoint:
no state depends on replicas or stages, so a run resumes exactly on another layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from gpipe_hpc.data.hashing import Words, absorb, hash_words

_NUM_ROUNDS: Final = 12  # with fewer, pairs of places are not evenly spread in small sets
_STREAM: Final = 4  # apart from the streams of synthetic samples
_VALIDATION_KEY: Final = (2**64 - 1, 2**64 - 1)  # no run's (seed, epoch)


class PlannedBatch(NamedTuple):
    """The samples of a global batch, their epoch, and the position after them."""

    indices: list[int]
    epoch: int
    position: int


@dataclass(frozen=True)
class ShuffledSampler:
    """Each epoch in an order of its own, keyed by (seed, epoch); every sample once an epoch.

    `size_at`: the batch size of the step behind so many finished ones; None for always
    `batch_size`, the largest.
    """

    num_samples: int
    batch_size: int
    seed: int
    size_at: Callable[[int], int] | None = None

    def batches(self, position: int, step: int = 0) -> Iterator["PlannedBatch"]:
        """Yield global batches from a position on, after `step` finished steps, without end."""
        while True:
            size = self.batch_size if self.size_at is None else self.size_at(step)
            indices, after = self.batch(position, size)
            yield PlannedBatch(indices, position // self.num_samples, after)
            position, step = after, step + 1

    def batch(self, position: int, size: int | None = None) -> tuple[list[int], int]:
        """Return the global batch of a `size` at a position and the position after it.

        A batch never spans two epochs: the last of an epoch may be smaller, nothing is dropped or
        padded. Without a size it has `batch_size`.
        """
        epoch, offset = divmod(position, self.num_samples)
        size = min(size or self.batch_size, self.num_samples - offset)
        places = np.arange(offset, offset + size, dtype=np.uint64)
        order = permute(places, self.num_samples, key=(self.seed, epoch))
        return [int(index) for index in order], position + size


def validation_batches(
    num_samples: int, batch_size: int, max_batches: int | None = None
) -> Iterator[list[int]]:
    """Yield batches of all samples, or of so many that `max_batches` hold; the last may be smaller.

    Which samples: the first ones of a permutation that depends on `num_samples` alone, not on the
    seed of a run, so that files that are sorted (by class, by source) do not bias the loss, every
    validation of every run sees the same samples, and more batches hold those of fewer. They are
    read in ascending order, which files and caches like best; a sum over them knows no order.
    """
    num_read = num_samples if max_batches is None else min(num_samples, batch_size * max_batches)
    if num_read < num_samples:
        places = np.arange(num_read, dtype=np.uint64)
        indices = np.sort(permute(places, num_samples, _VALIDATION_KEY)).tolist()
    else:
        indices = range(num_samples)
    for first in range(0, num_read, batch_size):
        yield [int(index) for index in indices[first : first + batch_size]]


def permute(places: Words, size: int, key: tuple[int, int]) -> Words:
    """Return where a random permutation of range(size) sends each place.

    Needs no memory of the permutation: a Feistel network permutes the next power of four, and
    what falls outside walks on until it is inside (Black and Rogaway, Ciphers with arbitrary
    finite domains, 2002), after at most four walks on average.
    """
    assert size >= 1, f"a permutation of {size} places"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = hash_words(_STREAM, *key, np.arange(_NUM_ROUNDS, dtype=np.uint64))
    result = _feistel(places, half_bits, round_keys)
    outside = result >= np.uint64(size)
    while outside.any():
        result[outside] = _feistel(result[outside], half_bits, round_keys)
        outside = result >= np.uint64(size)
    return result


def _feistel(places: Words, half_bits: int, round_keys: Words) -> Words:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = places >> bits, places & mask
    for round_key in np.split(round_keys, len(round_keys)):
        left, right = right, left ^ (absorb(round_key, right) & mask)
    return (left << bits) | right
