"""How far a cut is from the best one: against every cut of small models."""

from bisect import bisect_right
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.planner.cutting.distance import Distance, distance, fullest, least_of_fullest
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.cutting.pins import Pin
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


def keeps(pins, cut):
    ends = [0, *accumulate(cut)]
    return all(ends[s % len(cut)] <= i < ends[s % len(cut) + 1] for i, s in pins)


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0, 0.1, 20.25]), min_size=6, max_size=9),
    st.sampled_from(PLACES),
    st.lists(st.sampled_from([1.0, 2.0, 1.5]), min_size=4, max_size=4),
    st.booleans(),
    st.sampled_from([0, 0, 1, 2, 4]),
    st.data(),
)
@settings(max_examples=400, deadline=None)
def test_no_cut_is_below_the_bound(costs, where, paces, are_alike, num_pins, data):
    kind, ranks, each = where
    placement = place(kind, ranks, 4, each)
    stages = placement.num_stages
    costs = costs + [1.0] * max(0, stages - len(costs))
    paces = (1.0,) * ranks if are_alike else tuple(paces[:ranks])
    cuts = [
        [b - a for a, b in pairwise((0, *ends, len(costs)))]
        for ends in combinations(range(1, len(costs)), stages - 1)
    ]
    ends = [0, *accumulate(data.draw(st.sampled_from(cuts)))]
    pinned = data.draw(st.permutations(range(len(costs))))[:num_pins]
    from_last = data.draw(st.sampled_from([0, stages]))
    pins = tuple(Pin(i, bisect_right(ends, i) - 1 - from_last) for i in sorted(pinned))
    cuts = [cut for cut in cuts if keeps(pins, cut)]
    best = min(fullest(cut, placement, costs, paces) for cut in cuts)
    least = least_of_fullest(costs, placement, paces, pins)
    unpinned = least_of_fullest(costs, placement, paces)
    assert unpinned * (1 - 1e-12) <= least <= best * (1 + 1e-12)
    counts = tuple(data.draw(st.sampled_from(cuts)))
    slow = tuple(max(paces[rank] for rank in placement.holders(s)) for s in range(stages))
    cut = Partition(counts, tuple(costs), "time", (), slow, paces, pins=pins)
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
        ([1.0, 9.0, *[1.0] * 6], (1.0, 1.0), 10.0),  # the dearest layer, and another stage
        ([4.0, 4.0, 4.0, 0.0, 0.0], (1.0, 1.0), 8.0),  # two of the three dearest
        ([1.0] * 6, (1.0, 2.0), 4.0),  # four on the fast rank, two on the slow one
        ([3.0, 3.0, 0.0, 0.0], (1.0, 2.0), 6.0),
        ([9.0, 1.0, 1.0, 1.0, 1.0, 5.0], (1.0, 1.0), 10.0),
    ],
)
def test_the_bound_knows_that_layers_are_whole(costs, paces, least):
    assert least_of_fullest(costs, place("looped", 2, 4, 2), paces) == pytest.approx(least)
    mirrored = least_of_fullest(costs, place("mirrored", 2, 4, 1), (paces[0],) * 2)
    assert mirrored == pytest.approx(paces[0] * sum(costs) / 2)


def test_the_bound_knows_on_which_ranks_layers_have_to_be():
    """Pins were left out of it: a cut that was the best there is had `at most 60 %` too much."""
    looped, wave = place("looped", 2, 4, 2), place("wave", 2, 4, 2)
    costs = [1.0] * 10
    assert least_of_fullest(costs, looped, (1.0, 1.0)) == 5
    # Layers 0 to 6 are on stage 0, and one more on stage 2 at least.
    pinned = (Pin(6, 0),)
    assert least_of_fullest(costs, looped, (1.0, 1.0), pinned) == 8
    cut = Partition((7, 1, 1, 1), tuple(costs), "time", pins=pinned)
    assert distance(cut, looped, costs) == Distance(0.0, is_exact=False)
    # Of 12 layers 10 are on the stages 1 to 4, which two ranks of a V's three have alone.
    far, ones = place("wave", 3, 4, 2), [1.0] * 12
    assert least_of_fullest(ones, far, (1.0,) * 3) == 4
    assert least_of_fullest(ones, far, (1.0,) * 3, (Pin(1, 1), Pin(10, -2))) == 5
    # Without a pin, too: a V's first rank has the first layer and the last one.
    assert least_of_fullest([6.0, *[1.0] * 6, 6.0], wave, (1.0, 1.0)) == 12


def test_it_is_said_in_words():
    assert Distance(0.0, is_exact=False).text() == "no cut gives the most loaded rank less work"
    assert "has at most 4.0 % more work" in Distance(0.04, is_exact=False).text()
    assert "has 4.0 % more work than in the best cut" in Distance(0.04, is_exact=True).text()


def test_a_cut_by_hand_is_held_against_the_best_and_one_for_holes_is_the_best():
    costs = (1.0,) * 8
    by_hand = Partition((5, 3), costs, "parameters")
    assert distance(by_hand, place("one_each", 2, 4, 1), costs) == Distance(0.25, is_exact=True)
    holes = Partition((), costs, "time").cut_anew(3, 4)
    rows = place("rerouted", 4, 4, stages=3, copies=[2, 1, 1])
    found = distance(holes, rows, costs)
    assert found is not None and found.is_exact
    assert distance(by_hand, place("one_each", 2, 4, 1), (0.0,) * 8) is None


def test_more_stages_than_layers_have_no_best_cut():
    """A cut by hand with empty stages was refused by `plan`, though a run takes it."""
    costs = (1.0,) * 3
    by_hand = Partition((1, 1, 1, 0), costs, "parameters")
    assert distance(by_hand, place("one_each", 4, 4, 1), costs) is None
    assert distance(by_hand, place("looped", 2, 4, 2), costs) is None
