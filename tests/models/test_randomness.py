import re
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.models import (
    init_key,
    layer_key,
    microbatch_key,
    microbatch_keys,
    microbatch_prefix,
    mix64,
    randomness,
)

small = st.integers(0, 2**40)


def published_key(*words: int) -> int:
    """Return the published key, computed independently with NumPy's 64-bit arithmetic."""
    import numpy as np

    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for word in words:
            z = state + np.uint64(0x9E3779B97F4A7C15) * (np.uint64(word % 2**64) + np.uint64(1))
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = z ^ (z >> np.uint64(31))
    return int(state) % 2**63


@given(st.integers(-(2**63), 2**64), small, small, small)
def test_keys_follow_the_published_formula(seed: int, step: int, microbatch: int, layer: int):
    assert init_key(seed, layer) == published_key(1, seed, layer)
    assert microbatch_key(seed, step, microbatch, layer) == published_key(
        2, seed, step, microbatch, layer
    )


def test_the_docstring_states_the_formula_that_runs():
    text = randomness.__doc__ or ""
    code = re.search(r"::\n\n(    def mix64.*?)\n\n    init_key", text, re.S)
    assert code
    names: dict = {"GOLDEN": 0x9E3779B97F4A7C15}
    lines = [line[4:] for line in code.group(1).splitlines()]
    exec("\n".join(lines), names)
    assert names["key"](2, 7, 3, 1, 4) == microbatch_key(7, 3, 1, 4)
    assert names["key"](1, 7, 4) == init_key(7, 4)


def test_known_values_never_change():
    # The published first output of splitmix64 for seed 0, and keys of earlier versions.
    assert mix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert init_key(0, 0) == 48387319192754222
    assert microbatch_key(7, 3, 1, 4) == 925057155217083117


@given(small, small, small, small)
def test_prefix_gives_the_same_key(seed: int, step: int, microbatch: int, layer: int):
    prefix = microbatch_prefix(seed, step, microbatch)
    assert layer_key(prefix, layer) == microbatch_key(seed, step, microbatch, layer)


@given(small, small, small, st.lists(small, unique=True, max_size=4))
def test_all_keys_at_once_are_the_same(seed: int, step: int, first: int, layers: list[int]):
    microbatches = range(first, first + 3)
    expected = [{i: microbatch_key(seed, step, m, i) for i in layers} for m in microbatches]
    assert microbatch_keys(seed, step, microbatches, layers) == expected


def test_low_halves_are_distinct_and_even():
    # torch's CPU generator sees only the low 32 bits; 20 000 of 2**32 collide 0.05 times.
    keys = {
        microbatch_key(0, step, microbatch, layer)
        for step in range(20)
        for microbatch in range(20)
        for layer in range(50)
    }
    low = {key % 2**32 for key in keys}
    assert len(keys) == 20_000
    assert len(low) >= 19_998
    for bit in range(32):
        ones = sum(key >> bit & 1 for key in low)
        assert abs(ones - 10_000) < 6 * 71  # six standard deviations of a fair coin


def test_init_and_step_keys_never_meet():
    init = {init_key(seed, layer) for seed in range(30) for layer in range(30)}
    step = {microbatch_key(seed, s, m, 0) for seed in range(30) for s in range(6) for m in range(6)}
    assert not init & step


def test_keys_seed_torch():
    torch.Generator().manual_seed(microbatch_key(2**64 - 1, 10**9, 10**6, 10**4))
    assert 0 <= init_key(123, 5) < 2**63


def test_the_lock_may_be_taken_again_by_its_holder_only():
    taken = []
    with randomness.GENERATOR_LOCK, randomness.GENERATOR_LOCK:
        other = threading.Thread(
            target=lambda: taken.append(randomness.GENERATOR_LOCK.acquire(blocking=False))
        )
        other.start()
        other.join()
    assert taken == [False]
