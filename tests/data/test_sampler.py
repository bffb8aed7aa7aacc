"""Tests of the sampler: each sample once per epoch, for any batch size, without state."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.data import ShuffledSampler, validation_batches
from gpipe_hpc.data.sampler import permute


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def epoch(sampler: ShuffledSampler, number: int = 0) -> list[list[int]]:
    position, batches = number * sampler.num_samples, []
    while position < (number + 1) * sampler.num_samples:
        batch, position = sampler.batch(position)
        batches.append(batch)
    return batches


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(1, 70), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_every_sample_once_an_epoch(num_samples, batch_size, seed, number):
    batches = epoch(ShuffledSampler(num_samples, batch_size, seed), number)
    assert sorted(flat(batches)) == list(range(num_samples))
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert len(batches[-1]) == (num_samples - 1) % batch_size + 1


def test_batches_stop_at_the_end_of_an_epoch():
    sampler = ShuffledSampler(num_samples=10, batch_size=4, seed=0)
    batch, position = sampler.batch(8)
    assert (len(batch), position) == (2, 10)
    assert sampler.batch(10)[1] == 14


def test_other_batch_size_continues_where_the_first_stopped():
    """The order within an epoch does not depend on the batch size."""
    whole = flat(epoch(ShuffledSampler(100, 100, seed=3)))
    first, position = ShuffledSampler(100, 30, seed=3).batch(0)
    rest, _ = ShuffledSampler(100, 70, seed=3).batch(position)
    assert first + rest == whole


def test_order_depends_on_seed_and_epoch_alone():
    orders = {
        tuple(flat(epoch(ShuffledSampler(50, 50, seed), number)))
        for seed in range(4)
        for number in range(4)
    }
    assert len(orders) == 16
    assert epoch(ShuffledSampler(50, 7, 1), 2) == epoch(ShuffledSampler(50, 7, 1), 2)


def test_order_is_pinned():
    """The order must not change between versions, since checkpoints store only a position."""
    assert ShuffledSampler(10, 10, seed=0).batch(0)[0] == [2, 3, 8, 7, 4, 1, 0, 5, 9, 6]


def test_all_orders_of_four_are_equally_likely():
    """Chi-squared test over 24 orders: 23 degrees of freedom, so 64 is 6 sigma away."""
    num_keys = 4_800
    places = np.arange(4, dtype=np.uint64)
    counts = Counter(tuple(permute(places, 4, (seed, 0)).tolist()) for seed in range(num_keys))
    mean = num_keys / 24
    assert len(counts) == 24
    assert sum((count - mean) ** 2 / mean for count in counts.values()) < 64


def test_neighbours_are_spread_evenly():
    """Chi-squared test of where 0 and 1 of 7 go: 42 pairs, 41 degrees of freedom; 96 is 6 sigma."""
    num_keys = 2_100
    places = np.arange(2, dtype=np.uint64)
    counts = Counter(tuple(permute(places, 7, (0, epoch)).tolist()) for epoch in range(num_keys))
    mean = num_keys / 42
    assert len(counts) == 42
    assert sum((count - mean) ** 2 / mean for count in counts.values()) < 96


def test_tens_of_millions_need_no_table():
    sampler = ShuffledSampler(num_samples=50_000_017, batch_size=64, seed=0)
    batch, position = sampler.batch(3 * sampler.num_samples - 5)
    assert len(batch) == 5 and position == 3 * sampler.num_samples
    assert max(sampler.batch(0)[0]) > 1_000_000


@pytest.mark.parametrize(
    ("max_batches", "sizes"), [(None, [4, 4, 2]), (2, [4, 4]), (9, [4, 4, 2]), (0, [])]
)
def test_validation_is_read_in_order_with_its_tail(max_batches, sizes):
    batches = list(validation_batches(10, 4, max_batches))
    assert [len(batch) for batch in batches] == sizes
    indices = flat(batches)
    assert indices == sorted(set(indices)) and set(indices) <= set(range(10))


def test_part_of_validation_comes_from_all_of_it():
    """Regression: a subset contained only the first classes, or the first file of tokens."""
    chosen = np.array(flat(list(validation_batches(3_000, 8, 16))))
    assert len(set(chosen)) == 128
    per_class = np.bincount(chosen // 100, minlength=30)  # sorted: 100 samples of each class
    assert (per_class > 0).sum() >= 28 and per_class.max() <= 12


def test_more_validation_batches_hold_those_of_fewer():
    few, many = (set(flat(list(validation_batches(1_000, 8, n)))) for n in (5, 9))
    assert few < many


def test_validation_samples_are_pinned():
    """Validation samples must not change between versions, and do not depend on the seed."""
    assert flat(list(validation_batches(100, 3, 2))) == [2, 21, 29, 78, 84, 95]
