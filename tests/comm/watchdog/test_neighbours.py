"""Who watches whom: few, both ways, and in touch also where a host is gone."""

import math

import pytest

from gpipe_hpc.comm.watchdog.neighbours import neighbours, opens_connection

SIZES = [2, 3, 4, 5, 7, 8, 16, 33, 64, 100]


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_has_few_neighbours_and_they_have_it(size):
    for rank in range(size):
        own = neighbours(rank, size)
        assert rank not in own and len(own) <= 2 * math.ceil(math.log2(size))
        assert all(rank in neighbours(other, size) for other in own)
        assert all(opens_connection(rank, other) != opens_connection(other, rank) for other in own)


def test_the_number_of_neighbours_grows_with_the_logarithm_of_the_world():
    assert [len(neighbours(5, size)) for size in (8, 512, 4096, 16384)] == [5, 17, 23, 27]


@pytest.mark.parametrize("size", SIZES)
def test_news_reach_all_in_few_hops(size):
    assert hops(size, range(0)) <= math.ceil(math.log2(size))


@pytest.mark.parametrize("host", [2, 4, 8])
def test_news_reach_all_that_are_left_when_a_host_of_consecutive_ranks_is_gone(host):
    for first in range(0, 64, host):
        assert hops(64, range(first, first + host)) <= 7


def hops(size, gone):
    """Return after how many hops the first rank's news have reached all that are left."""
    left = set(range(size)) - set(gone)
    reached = {min(left)}
    for count in range(size):
        if reached == left:
            return count
        reached |= {n for rank in reached for n in neighbours(rank, size)} & left
    raise AssertionError(f"never reached: {left - reached}")
