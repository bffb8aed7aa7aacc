"""Assignment of samples to global batches as a pure function of the position in the run.

The position is the number of samples consumed since the start. It is the only state in a checkpoint
and does not depend on replicas or stages, so a run resumes exactly on another layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from gpipe_hpc.data.hashing import Words, absorb, hash_words

_NUM_ROUNDS: Final = 12  # with fewer rounds, pairs are not uniformly distributed in small sets
_STREAM: Final = 4  # random stream; synthetic samples use others
_VALIDATION_KEY: Final = (2**64 - 1, 2**64 - 1)  # unlike any run's (seed, epoch)


class PlannedBatch(NamedTuple):
    """The sample indices of a global batch, their epoch, and the position after the batch."""

    indices: list[int]
    epoch: int
    position: int


@dataclass(frozen=True)
class ShuffledSampler:
    """Sampler of global batches that shuffles each epoch with the key (seed, epoch).

    Every sample is used exactly once per epoch.

    Args:
        num_samples: number of samples per epoch.
        batch_size: the largest global batch size.
        seed: seed of the order.
        size_at: function from the number of finished steps to the batch size of the next step; None
            uses `batch_size` for all steps.
    """

    num_samples: int
    batch_size: int
    seed: int
    size_at: Callable[[int], int] | None = None

    def batches(self, position: int, step: int = 0) -> Iterator["PlannedBatch"]:
        """Yield global batches without end, from a position and a number of finished steps on."""
        while True:
            size = self.batch_size if self.size_at is None else self.size_at(step)
            indices, after = self.batch(position, size)
            yield PlannedBatch(indices, position // self.num_samples, after)
            position, step = after, step + 1

    def batch(self, position: int, size: int | None = None) -> tuple[list[int], int]:
        """Return the global batch of `size` samples at a position, and the position after it.

        A batch never spans two epochs: the last batch of an epoch may be smaller, nothing is
        dropped or padded. `size` defaults to `batch_size`.
        """
        epoch, offset = divmod(position, self.num_samples)
        size = min(size or self.batch_size, self.num_samples - offset)
        places = np.arange(offset, offset + size, dtype=np.uint64)
        order = permute(places, self.num_samples, key=(self.seed, epoch))
        return [int(index) for index in order], position + size


def validation_batches(
    num_samples: int, batch_size: int, max_batches: int | None = None
) -> Iterator[list[int]]:
    """Yield batches of all validation samples, or at most `max_batches`; the last may be smaller.

    A subset consists of the first samples of a permutation that depends on `num_samples` only, so
    that sorted files do not bias the loss, every run validates on the same samples, and a larger
    subset contains a smaller one. Indices are sorted, which is fast for files and caches.
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
    """Map indices through a pseudorandom permutation of range(size), determined by `key`.

    Computes each element without storing the permutation: a Feistel network permutes the next power
    of four, and results outside the range are permuted again until they are inside (Black and
    Rogaway, Ciphers with arbitrary finite domains, 2002), at most four times on average.
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
