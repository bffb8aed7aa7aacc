"""Cuts for stages that unequal numbers of ranks hold: the best there is."""

from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.errors import PartitionError, ScheduleError
from gpipe_hpc.planner.cutting.minimax import minimax
from gpipe_hpc.planner.cutting.unequal_ranks import copies_for, cut_for_ranks, paces_in_rows


def amounts(counts, costs):
    ends = [0, *accumulate(counts)]
    return [sum(map(Fraction, costs[start:end])) for start, end in pairwise(ends)]


def busiest(counts, copies, costs):
    pairs = zip(amounts(counts, costs), copies, strict=True)
    return max(amount / number for amount, number in pairs)


def best_of_all(costs, stages, ranks):
    """Try every cut, and every choice of the stages that are on one rank more."""
    low, num_high = divmod(ranks, stages)
    return min(
        busiest([b - a for a, b in pairwise((0, *ends, len(costs)))], copies, costs)
        for ends in combinations(range(1, len(costs)), stages - 1)
        for high in combinations(range(stages), num_high)
        for copies in [[low + (stage in high) for stage in range(stages)]]
    )


@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 9, 0.5, 0.1, 20.25]), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 8),
)
@settings(max_examples=150, deadline=None)
def test_no_cut_lets_the_busiest_rank_do_less(costs, stages, more):
    stages = min(stages, len(costs))
    ranks = stages + more
    counts = cut_for_ranks(costs, stages, ranks)
    copies = copies_for(counts, costs, ranks)
    assert sum(counts) == len(costs) and min(counts) > 0 and sum(copies) == ranks
    assert busiest(counts, copies, costs) == best_of_all(costs, stages, ranks)


def speeds_of(copies, paces):
    """Return how fast the ranks of each stage are together; ranks are numbered row by row."""
    numbers = iter(range(len(paces)))
    speeds = [Fraction()] * len(copies)
    for row in range(max(copies)):
        for stage, count in enumerate(copies):
            if row < count:
                speeds[stage] += 1 / Fraction(paces[next(numbers)])
    return speeds


@st.composite
def unequal(draw):
    costs = draw(st.lists(st.sampled_from([0, 1, 2, 5, 9, 0.5, 20.25]), min_size=1, max_size=7))
    stages = draw(st.integers(1, min(4, len(costs))))
    ranks = stages + draw(st.integers(0, 5))
    pace = st.sampled_from([1, 1.5, 2, 0.25, 7])
    return costs, stages, draw(st.lists(pace, min_size=ranks, max_size=ranks))


@given(unequal())
@settings(max_examples=150, deadline=None)
def test_of_ranks_of_unequal_paces_the_busiest_does_least(size):
    """Against every cut, and every choice of the stages that the last row has ranks for."""
    costs, stages, paces = size
    counts = cut_for_ranks(costs, stages, len(paces), paces)
    copies = copies_for(counts, costs, len(paces), paces)
    low, num_high = divmod(len(paces), stages)
    assert sorted(copies) == [low] * (stages - num_high) + [low + 1] * num_high
    best = min(
        busiest([b - a for a, b in pairwise((0, *ends, len(costs)))], speeds, costs)
        for ends in combinations(range(1, len(costs)), stages - 1)
        for high in combinations(range(stages), num_high)
        for speeds in [speeds_of([low + (stage in high) for stage in range(stages)], paces)]
    )
    took = busiest(counts, speeds_of(copies, paces), costs)
    assert best <= took <= best * (1 + 1e-8)
    means = [count / speed for count, speed in zip(copies, speeds_of(copies, paces), strict=True)]
    assert paces_in_rows(copies, paces) == pytest.approx([float(each) for each in means])


def test_a_stage_on_fewer_ranks_gets_fewer_layers():
    counts = cut_for_ranks([1] * 14, 4, 7)
    assert sorted(counts) == [2, 4, 4, 4]
    copies = copies_for(counts, [1] * 14, 7)
    assert sorted(zip(counts, copies, strict=True)) == [(2, 1), (4, 2), (4, 2), (4, 2)]


def test_whole_pipelines_are_cut_as_ever_and_equal_stages_lose_the_later_ranks():
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    assert cut_for_ranks(costs, 3, 6) == minimax(costs, 3)
    assert copies_for([2, 2, 2], [1] * 6, 5) == [2, 2, 1]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(PartitionError, match="more stages than layers"):
        cut_for_ranks([1, 2], 3, 4)
    with pytest.raises(ScheduleError, match="3 stages need at least 3 ranks"):
        cut_for_ranks([1, 2, 3], 3, 2)
