"""How far a cut is from the best one: against every cut of small models."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.planning.cutting.distance import Distance, distance, fullest, least_of_fullest
from gpipe_hpc.planning.cutting.partition import Partition
from gpipe_hpc.schedule import place

PLACES = (
    ("one_each", 3, 1),
    ("looped", 2, 2),
    ("looped", 3, 2),
    ("wave", 2, 2),
    ("wave", 2, 4),
    ("mirrored", 2, 1),
    ("mirrored", 4, 1),
)


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0, 0.1, 20.25]), min_size=6, max_size=9),
    st.sampled_from(PLACES),
    st.lists(st.sampled_from([1.0, 2.0, 1.5]), min_size=4, max_size=4),
    st.booleans(),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_no_cut_is_below_the_bound(costs, where, paces, are_alike, data):
    kind, ranks, each = where
    placement = place(kind, ranks, 4, each)
    stages = placement.num_stages
    costs = costs + [1.0] * max(0, stages - len(costs))
    paces = (1.0,) * ranks if are_alike else tuple(paces[:ranks])
    cuts = [
        [b - a for a, b in pairwise((0, *ends, len(costs)))]
        for ends in combinations(range(1, len(costs)), stages - 1)
    ]
    best = min(fullest(cut, placement, costs, paces) for cut in cuts)
    holders = [len(placement.holders(stage)) for stage in range(stages)]
    assert least_of_fullest(costs, holders, paces) <= best * (1 + 1e-12)
    counts = tuple(data.draw(st.sampled_from(cuts)))
    slow = tuple(max(paces[rank] for rank in placement.holders(s)) for s in range(stages))
    cut = Partition(counts, tuple(costs), "time", (), slow, paces)
    found = distance(cut, placement, costs)
    real = fullest(counts, placement, costs, paces) / best - 1
    assert found.share >= real - 1e-9
    if found.is_exact:
        assert kind == "one_each" and found.share == pytest.approx(real, abs=1e-9)


@pytest.mark.parametrize(
    ("costs", "paces", "least"),
    [
        ([1.0] * 8, (1.0, 1.0), 4.0),
        ([1.0] * 7, (1.0, 1.0), 4.0),  # one of two ranks has four layers
        ([9.0, *[1.0] * 6], (1.0, 1.0), 9.0),  # the dearest layer
        ([4.0, 4.0, 4.0, 0.0, 0.0], (1.0, 1.0), 8.0),  # two of the three dearest
        ([1.0] * 6, (1.0, 2.0), 4.0),  # four on the fast rank, two on the slow one
        ([3.0, 3.0, 0.0, 0.0], (1.0, 2.0), 6.0),
    ],
)
def test_the_bound_knows_that_layers_are_whole(costs, paces, least):
    assert least_of_fullest(costs, [1] * 4, paces) == pytest.approx(least)
    mirrored = least_of_fullest(costs, [2, 2], (paces[0],) * 2)
    assert mirrored == pytest.approx(paces[0] * sum(costs) / 2)


def test_it_is_said_in_words():
    assert Distance(0.0, is_exact=False).text() == "no cut leaves the fullest rank less to do"
    assert "has at most 4.0 % more to do" in Distance(0.04, is_exact=False).text()
    assert "has 4.0 % more to do than in the best cut" in Distance(0.04, is_exact=True).text()


def test_a_cut_by_hand_is_held_against_the_best_and_one_for_holes_is_the_best():
    costs = (1.0,) * 8
    by_hand = Partition((5, 3), costs, "parameters")
    assert distance(by_hand, place("one_each", 2, 4, 1), costs) == Distance(0.25, is_exact=True)
    holes = Partition((), costs, "time").cut_anew(3, 4)
    rows = place("rerouted", 4, 4, stages=3, copies=[2, 1, 1])
    found = distance(holes, rows, costs)
    assert found is not None and found.is_exact
    assert distance(by_hand, place("one_each", 2, 4, 1), (0.0,) * 8) is None
