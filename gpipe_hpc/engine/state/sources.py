"""Generators of random numbers besides torch's: Python's and NumPy's, and those a layer holds."""

import ctypes
import random
import sys
from collections.abc import Callable, Collection
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from gpipe_hpc.models import numpy_is_seedable, numpy_words

FIRST_OWN: Final = 2

_WORDS: Final = 624  # of the Mersenne twister's state; the position follows
_STATE_BYTES: Final = 4 * (_WORDS + 1)
_HEAD_BYTES: Final = object.__basicsize__
_FEW_BYTES: Final = 4 * 4  # the position, and three words


class ProcessMarks(NamedTuple):
    """What tells whether anybody has drawn meanwhile: all words of the states; 2 us."""

    python: bytes
    gauss: float | None  # a normal number that Python has in store
    numpy: bytes

    @classmethod
    def now(cls) -> "ProcessMarks":
        """Return the present marks."""
        generator = _global_python()
        return cls(python_mark(generator), generator.gauss_next, numpy_mark())

    def differ(self, other: "ProcessMarks") -> tuple[bool, bool]:
        """Say for Python's and for NumPy's generator whether it was drawn from."""
        python = self.python != other.python or self.gauss != other.gauss
        return python, self.numpy != other.numpy

    def restore(self) -> None:
        """Go back to where these marks were taken."""
        position, *words = np.frombuffer(self.python, dtype=np.uint32).tolist()
        random.setstate((3, (*words, position), self.gauss))
        if numpy_is_seedable() and self.numpy:
            numbers = np.frombuffer(self.numpy, dtype=np.uint32)
            state = ("MT19937", numbers[:_WORDS], int(numbers[_WORDS]), 0, 0.0)
            np.random.set_state(state)


def have_stayed(marks: ProcessMarks) -> bool:
    """Say whether nobody has drawn since `marks`, by a few words of them; 0.6 us.

    Each draw moves the position; where that begins anew, the words change as well. Another seed
    makes other words.
    """
    generator = _global_python()
    if generator.gauss_next != marks.gauss or not _lie_behind_the_head():
        return False
    if ctypes.string_at(id(generator) + _HEAD_BYTES, _FEW_BYTES) != marks.python[:_FEW_BYTES]:
        return False
    numpy = _global_numpy()
    if not isinstance(numpy, np.random.MT19937):
        return not marks.numpy
    end = _address_of(numpy) + _STATE_BYTES - _FEW_BYTES
    return ctypes.string_at(end, _FEW_BYTES) == marks.numpy[-_FEW_BYTES:]


def _global_python() -> Any:
    module: Any = random
    return module._inst


def python_mark(generator: random.Random) -> bytes:
    """Return position and words of one of Python's generators.

    CPython has them behind the head of the object, and copying them takes a twentieth of the time
    of asking for them; where they are not found there, it is asked.
    """
    if _lie_behind_the_head():
        return ctypes.string_at(id(generator) + _HEAD_BYTES, _STATE_BYTES)
    return _asked(generator)


def _asked(generator: random.Random) -> bytes:
    words = generator.getstate()[1]
    return np.array((words[-1], *words[:-1]), dtype=np.uint32).tobytes()


@cache
def _lie_behind_the_head() -> bool:
    """Say whether Python's generators keep their state where CPython's are known to."""
    if sys.implementation.name != "cpython":
        return False
    if random.Random.__basicsize__ < _HEAD_BYTES + _STATE_BYTES:
        return False
    tried = random.Random(1)
    for _ in range(3):
        if ctypes.string_at(id(tried) + _HEAD_BYTES, _STATE_BYTES) != _asked(tried):
            return False
        tried.random()
    return True


def numpy_mark() -> bytes:
    """Return the state of NumPy's global generator as it lies in memory; nothing of others.

    Asking NumPy for it takes a hundred times as long.
    """
    generator = _global_numpy()
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(_address_of(generator), _STATE_BYTES)


@lru_cache(maxsize=4)
def _address_of(generator: np.random.MT19937) -> int:
    address: int = generator.ctypes.state_address
    return address


def _global_numpy() -> Any:
    module: Any = np.random
    return module.get_bit_generator()


class OwnGenerator(NamedTuple):
    """One generator that a layer holds: how to seed it, to read its state and to put it back."""

    seed: Callable[[int], object]
    state: Callable[[], Any]
    restore: Callable[[Any], object]


def own_generators(layer: nn.Module, without: Collection[int]) -> tuple[OwnGenerator, ...]:
    """Return the generators among a layer's and its submodules' attributes, each once.

    `without`: the ids of those that are seeded as others already.
    """
    found: dict[int, OwnGenerator] = {}
    for _, module in sorted(layer.named_modules(), key=lambda item: item[0]):
        for _, value in sorted(vars(module).items()):
            generator = _as_own(value)
            if generator is not None and id(value) not in without:
                found.setdefault(id(value), generator)
    return tuple(found.values())


def _as_own(value: Any) -> OwnGenerator | None:
    if isinstance(value, torch.Generator):
        return OwnGenerator(value.manual_seed, value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return OwnGenerator(value.seed, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        seed_words = value.seed
        return OwnGenerator(
            lambda key: seed_words(numpy_words(key)), value.get_state, value.set_state
        )
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        kind = type(bits)

        def restore(state: Any) -> None:
            bits.state = state

        return OwnGenerator(
            lambda key: restore(kind(numpy_words(key)).state), lambda: bits.state, restore
        )
    return None
