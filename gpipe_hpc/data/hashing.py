"""Counter-based random numbers: hashes of a few integers, vectorized over arrays.

The mixing function is `gpipe_hpc.models.mix64`, the finalizer of splitmix64, applied per integer.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_ONE: Final = np.uint64(1)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def hash_words(*words: int | Words) -> Words:
    """Return 64 well-mixed bits for each combination of integers; arrays broadcast."""
    state = np.zeros(1, np.uint64)
    for word in words:
        # At least one dimension: overflow of scalars would raise a warning.
        state = absorb(state, np.atleast_1d(np.asarray(word, np.uint64)))
    return state


def absorb(state: Words, word: Words) -> Words:
    """Mix one more integer into the hash state."""
    mixed: Words = state + _GOLDEN * (word + _ONE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed
