"""What ranks tell of themselves, in sum: the same over levels of groups as over one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.collectives.rank_summary import NUM_REPORTED, RankSlots, summarise_ranks
from gpipe_hpc.comm.collectives.tree_group import TreeGroup, own_tree_levels
from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.errors import ConfigError


def in_levels(world, width):
    groups = [
        world.group([tuple(level)]) for level in own_tree_levels(world.size, world.rank, width)
    ]
    return TreeGroup(range(world.size), world.rank, groups, width)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(2, 4))
def test_all_find_totals_extremes_and_who_is_first(numbers, width):
    """Each rank told each other all that it told: 64 bytes of every rank of the world."""

    def body(world):
        own = (numbers[world.rank], float("-inf"), -float(world.rank))
        return summarise_ranks(own, in_levels(world, width), world.rank)

    found = run_on_threads(len(numbers), body)
    assert all(each == found[0] for each in found)
    told, last = found[0], len(numbers) - 1
    assert told.totals[:3] == (sum(numbers), float("-inf"), -last * (last + 1) / 2)
    assert told.least[:3] == (min(numbers), float("-inf"), -last)
    assert told.greatest[:3] == (max(numbers), float("-inf"), 0)
    assert told.first[:3] == (numbers.index(max(numbers)), 0, 0)
    assert told.totals[3:] == (0.0,) * (NUM_REPORTED - 3)


def test_what_travels_does_not_grow_with_the_ranks():
    def size(num_ranks):
        solo = SoloGroup(0)
        levels = [solo for _ in own_tree_levels(num_ranks, 0, 8)]
        return RankSlots(TreeGroup(range(num_ranks), 0, levels, 8), 0).size

    assert size(8) == size(64) == size(16_384)


def test_more_than_there_is_room_for_is_refused():
    with pytest.raises(ConfigError, match=r"at most 8 numbers .*, got 9"):
        RankSlots(SoloGroup(0), 0).of(range(9))
