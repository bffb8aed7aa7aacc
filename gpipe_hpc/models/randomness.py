"""The published formula that derives all random seeds, independent of the layout.

With 64-bit unsigned arithmetic (everything modulo 2**64) and ``GOLDEN = 0x9E3779B97F4A7C15``::

    def mix64(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def key(*words):
        h = 0
        for word in words:
            h = mix64((h + GOLDEN * (word + 1)) % 2**64)
        return h % 2**63

    init_key(seed, layer)                          == key(1, seed, layer)
    microbatch_key(seed, step, microbatch, layer)  == key(2, seed, step, microbatch, layer)
    source_key(layer_key, source)                  == key(3, layer_key, source)
    message_key(seed, step, copy, stage, bucket)   == key(4, seed, step, copy, stage, bucket)

Before layer ``i`` is built, torch is seeded with ``torch.manual_seed(init_key(seed, i))``, and
Python's and NumPy's generators as described below, with that key;
``torch.manual_seed(microbatch_key(seed, step, m, i))`` precedes every forward (the recomputed one
too) of layer ``i`` on micro-batch ``m``. ``step`` counts optimizer steps from 0, ``m`` is the
micro-batch's index in the global batch (over all replicas and accumulation), ``i`` the layer's
index in the model, or the number of layers for the loss function; ``seed`` is taken modulo 2**64.

Other generators are seeded too, each with its own number, so that no two produce the same stream:
``random.seed(k(0))`` for Python's, ``numpy.random.seed([k(1) % 2**32, k(1) >> 32])`` for NumPy's
global one, and ``k(2)``, ``k(3)``, ... for generators that the layer itself holds, in the order of
their dotted names, where ``k(n) == source_key(microbatch_key(seed, step, m, i), n)``. Generators of
torch and Python take that number; NumPy's take the pair of words.

``message_key`` seeds the generator with which a replica of a stage, counted over the ranks that
hold the stage, rounds a compressed gradient bucket (``outer.compress=qsgd``).

``mix64`` is the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014, variant 13). The key keeps the low bits since torch's CPU generator seeds itself
with the low 32 of them.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_INIT: Final = 1
_MICROBATCH: Final = 2
_SOURCE: Final = 3
_MESSAGE: Final = 4
_PYTHON: Final = 0
_NUMPY: Final = 1

GENERATOR_LOCK: Final = threading.RLock()
"""Acquired from seeding torch's CPU generator until its last draw.

The generator belongs to the process; ranks that are threads of one process share it.
"""


def mix64(z: int) -> int:
    """Scramble 64 bits with a bijection in which every input bit affects every output bit."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _absorb(state: int, word: int) -> int:
    # The multiplier is odd, so for one state two different words never collide.
    return mix64((state + _GOLDEN * (word + 1)) & _MASK)


def init_key(seed: int, layer: int) -> int:
    """Return the seed for the initial weights of layer ``layer`` (0 <= key < 2**63)."""
    assert layer >= 0, f"layer index {layer} is negative"
    return _absorb(_absorb(_absorb(0, _INIT), seed), layer) & (_MASK >> 1)


def microbatch_prefix(seed: int, step: int, microbatch: int) -> int:
    """Return the hash state common to a micro-batch's keys of all layers, for `layer_key`."""
    assert step >= 0, f"step {step} is negative"
    assert microbatch >= 0, f"micro-batch index {microbatch} is negative"
    return _absorb(_absorb(_absorb(_absorb(0, _MICROBATCH), seed), step), microbatch)


def layer_key(prefix: int, layer: int) -> int:
    """Return the seed of a layer's forward, given its micro-batch's prefix (0 <= key < 2**63)."""
    return _absorb(prefix, layer) & (_MASK >> 1)


def microbatch_key(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Return the seed of a layer's forward on one global micro-batch (0 <= key < 2**63)."""
    assert layer >= 0, f"layer index {layer} is negative"
    return layer_key(microbatch_prefix(seed, step, microbatch), layer)


def source_key(layer_key: int, source: int) -> int:
    """Return the seed of a generator other than torch's (0 <= key < 2**63).

    `source` is 0 for Python's generator, 1 for NumPy's, 2 and more for those that the layer holds.
    """
    assert source >= 0, f"source {source} is negative"
    return _absorb(_absorb(_absorb(0, _SOURCE), layer_key), source) & (_MASK >> 1)


def message_key(seed: int, step: int, copy: int, stage: int, bucket: int) -> int:
    """Return the seed for stochastic rounding of a gradient bucket (0 <= key < 2**63).

    `copy` is the index of the rank among those that hold the stage.
    """
    state = _absorb(0, _MESSAGE)
    for word in (seed, step, copy, stage, bucket):
        state = _absorb(state, word)
    return state & (_MASK >> 1)


def microbatch_keys(
    seed: int, step: int, microbatches: range, layers: Sequence[int]
) -> list[dict[int, int]]:
    """Return `microbatch_key` of several micro-batches and layers, one dict per micro-batch.

    Vectorised: a thousand keys take little longer than a single one.
    """
    assert step >= 0 and microbatches.start >= 0, f"step {step}, {microbatches}: negative"
    prefix = np.uint64(_absorb(_absorb(_absorb(0, _MICROBATCH), seed), step))
    states = _mix64(prefix + np.array([_GOLDEN * (m + 1) & _MASK for m in microbatches], np.uint64))
    words = np.array([_GOLDEN * (layer + 1) & _MASK for layer in layers], dtype=np.uint64)
    keys = _mix64(states[:, None] + words) & np.uint64(_MASK >> 1)
    return [dict(zip(layers, row, strict=True)) for row in keys.tolist()]


def _mix64(z: Words) -> Words:
    """Vectorised `mix64`; unsigned products of numpy wrap around."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class ProcessStates(NamedTuple):
    """Snapshot of the states of Python's and NumPy's global generators."""

    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> "ProcessStates":
        """Return the current states (takes 40 us)."""
        return cls(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def process_generators_kept() -> Iterator[None]:
    """Context that restores Python's and NumPy's global generators on exit."""
    states = ProcessStates.now()
    try:
        yield
    finally:
        states.restore()


def seed_python(layer_key: int) -> None:
    """Seed Python's generator before a layer is built or run."""
    random.seed(source_key(layer_key, _PYTHON))


def seed_numpy(layer_key: int) -> None:
    """Seed NumPy's global generator, unless the user replaced it."""
    if numpy_is_seedable():
        np.random.seed(numpy_words(source_key(layer_key, _NUMPY)))


def numpy_is_seedable() -> bool:
    """Return whether NumPy's global generator is its original one."""
    module: Any = np.random
    return isinstance(module.get_bit_generator(), np.random.MT19937)


def numpy_words(key: int) -> list[int]:
    """Split a key into the two 32-bit words that seed a NumPy generator."""
    return [key & 0xFFFFFFFF, key >> 32]
