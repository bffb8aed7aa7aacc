"""What would let replicas of unequal speed end together."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.settings import MicrobatchSplit
from gpipe_hpc.trainer.summary.balance import balance


def test_a_replica_that_takes_three_times_as_long_gets_a_third():
    found = balance(
        [4.0, 2.0, 12.0, 3.0], MicrobatchSplit.of_counts((4, 4))
    )  # two stages a replica
    assert found is not None and found.weights == (3, 1)
    assert found.gain == pytest.approx(0.5)


def test_what_is_balanced_is_left_alone():
    assert balance([6.0, 6.3], MicrobatchSplit.of_counts((6, 2))) is None
    assert balance([4.0, 4.2], MicrobatchSplit.of_counts((4, 4))) is None
    assert balance([4.0, 9.0], MicrobatchSplit.of_counts((1, 1))) is None, (
        "each needs a micro-batch"
    )


def test_one_replica_or_no_times_give_no_advice():
    assert balance([], MicrobatchSplit.of_counts((4, 4))) is None
    assert balance([3.0, 1.0], MicrobatchSplit.of_counts((4,))) is None
    assert balance([3.0, 0.0], MicrobatchSplit.of_counts((4, 4))) is None


@given(
    st.lists(st.floats(0.1, 10.0), min_size=2, max_size=3),
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
)
def test_nothing_is_faster_and_the_weights_divide(costs, counts):
    size = min(len(costs), len(counts))
    costs, counts = costs[:size], counts[:size]
    total = sum(counts)
    ended = max(c * n for c, n in zip(costs, counts, strict=True))
    every = itertools.product(range(1, total + 1), repeat=size)
    best = min(
        max(c * n for c, n in zip(costs, split, strict=True))
        for split in every
        if sum(split) == total
    )
    found = balance(
        [c * n for c, n in zip(costs, counts, strict=True)], MicrobatchSplit.of_counts(counts)
    )
    if found is None:
        assert best > ended * 0.89
        return
    assert found.gain == pytest.approx(1 - best / ended)
    if total % size == 0:
        divided = MicrobatchSplit.divide(total // size, size, found.weights).counts
        assert max(c * n for c, n in zip(costs, divided, strict=True)) == pytest.approx(best)
