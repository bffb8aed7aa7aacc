"""Random numbers by position: a pure function of a few words, over whole arrays.

The mixing is `gpipe_hpc.models.mix64`, the finaliser of splitmix64, one word after the other.
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
    """Return 64 well-mixed bits for each combination of words; arrays broadcast."""
    state = np.zeros(1, np.uint64)
    for word in words:
        # At least one dimension: arrays wrap around in silence, scalars with a warning.
        state = absorb(state, np.atleast_1d(np.asarray(word, np.uint64)))
    return state


def absorb(state: Words, word: Words) -> Words:
    """Return the bits for one word more than those that made `state`."""
    mixed: Words = state + _GOLDEN * (word + _ONE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed
