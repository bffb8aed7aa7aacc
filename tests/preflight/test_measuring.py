"""Which pairs of ranks exchange something at the same time."""

from hypothesis import given
from hypothesis import strategies as st

from gpipe_hpc.preflight.measuring import in_rounds, ring

RANKS = st.integers(0, 12)
PAIRS = st.lists(st.tuples(RANKS, RANKS).filter(lambda pair: pair[0] != pair[1]))


@given(PAIRS)
def test_each_pair_is_in_one_round_and_no_rank_twice_in_any(pairs):
    rounds = in_rounds(pairs)
    flat = [pair for each in rounds for pair in each]
    assert sorted(flat) == sorted({(min(pair), max(pair)) for pair in pairs})
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))


@given(PAIRS)
def test_the_rounds_do_not_depend_on_the_order_of_the_pairs(pairs):
    assert in_rounds(pairs) == in_rounds(reversed(pairs))


def test_a_chain_takes_two_rounds():
    assert in_rounds([(k, k + 1) for k in range(64)])[0] == [(k, k + 1) for k in range(0, 64, 2)]
    assert len(in_rounds([(k, k + 1) for k in range(64)])) == 2


def test_a_ring_has_each_pair_of_neighbours_once():
    assert ring([5]) == []
    assert ring([2, 6]) == [(2, 6)]
    assert ring([1, 3, 5]) == [(1, 3), (1, 5), (3, 5)]
