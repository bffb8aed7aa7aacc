import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import LayerSpec, layer_parameters, stage_layers
from gpipe_hpc.planner import check_given_cut, minimax, uniform

costs_strategy = st.lists(
    st.one_of(
        st.integers(0, 6),
        st.floats(0, 1e3),
        st.sampled_from([0.1, 0.2, 0.3, 1e-30, 1e16]),
    ),
    min_size=1,
    max_size=9,
)


def brute_force(costs: list[float], stages: int) -> list[int]:
    """Try every cut with exact fractions, in the order of preference that is documented."""
    exact = [Fraction(cost) for cost in costs]

    def price(cut: tuple[int, ...]) -> tuple:
        ends = (0, *cut, len(costs))
        spans = list(itertools.pairwise(ends))
        sums = [sum(exact[a:b], Fraction(0)) for a, b in spans]
        squares = sum(s * s for s in sums)
        return max(sums), squares, sum((b - a) ** 2 for a, b in spans), cut[::-1]

    best = min(itertools.combinations(range(1, len(costs)), stages - 1), key=price)
    return [b - a for a, b in itertools.pairwise((0, *best, len(costs)))]


@settings(max_examples=300, deadline=None)
@given(costs_strategy)
def test_minimax_is_what_trying_every_cut_finds(costs: list[float]):
    for stages in range(1, len(costs) + 1):
        assert minimax(costs, stages) == brute_force(costs, stages)


def test_every_small_case_of_small_integers():
    for length in range(1, 7):
        for costs in itertools.product((0, 1, 3), repeat=length):
            for stages in range(1, length + 1):
                assert minimax(costs, stages) == brute_force(list(costs), stages)


def test_floats_are_never_rounded():
    # In floats 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1, and 1e16 + 1 + 1 == 1e16: sums taken in some
    # order would prefer a cut for its rounding.
    costs = [1e16, 1.0, 1.0, 1e16]
    assert minimax(costs, 2) == [2, 2]
    assert minimax([1e16, 1.0, 1.0, 1.0, 1e16 + 2], 2) == [3, 2]


def test_a_giant_layer_does_not_leave_the_others_uneven():
    assert minimax([100, 1, 1, 1, 1, 1, 1], 4) == [1, 2, 2, 2]


def test_large_models_are_exact_against_a_plain_dynamic_programme():
    costs = [((i * 7919) % 997) / 7 for i in range(120)]
    exact = [Fraction(c) for c in costs]
    prefix = [Fraction(0), *itertools.accumulate(exact)]
    best = prefix[:]
    for _ in range(12):
        best = [Fraction(0)] + [
            min(max(best[i], prefix[j] - prefix[i]) for i in range(j)) for j in range(1, 121)
        ]
    counts = minimax(costs, 13)
    bottleneck = max(sum(exact[i] for i in span) for span in stage_layers(counts))
    assert bottleneck == best[-1]


def test_two_thousand_layers_on_many_stages():
    counts = minimax([1e3] + [1 + (i * 31 % 17) / 10 for i in range(1999)], 128)
    assert len(counts) == 128
    assert sum(counts) == 2000
    assert min(counts) >= 1


def test_uniform_spreads_the_rest_over_the_last_stages():
    assert uniform(8, 4) == [2, 2, 2, 2]
    assert uniform(7, 3) == [2, 2, 3]
    assert uniform(3, 3) == [1, 1, 1]


def test_layers_without_parameters_are_fine():
    layers = [nn.ReLU(), LayerSpec(nn.Linear, 9, 9), nn.ReLU(), LayerSpec(nn.Linear, 9, 9)]
    assert minimax(layer_parameters(layers), 2) == [2, 2]
    assert minimax(layer_parameters([nn.ReLU()] * 5), 2) == [2, 3]


def test_stage_layers():
    assert stage_layers([2, 0, 1]) == [range(0, 2), range(2, 2), range(2, 3)]


def test_empty_stages_only_when_asked_and_only_when_needed():
    with pytest.raises(
        PartitionError, match=r"more stages than layers: the model has 2 layers, got 3"
    ):
        minimax([1, 1], 3)
    assert minimax([1, 1], 3, allow_empty=True) == [1, 1, 0]
    assert minimax([1, 1, 1], 3, allow_empty=True) == [1, 1, 1]
    assert uniform(0, 2, allow_empty=True) == [0, 0]
    with pytest.raises(PartitionError, match="more stages than layers"):
        uniform(1, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bad_costs_name_the_layer(bad: float):
    with pytest.raises(PartitionError, match=r"invalid cost of layer 1"):
        minimax([1.0, bad], 1)


def test_no_stages_are_refused():
    with pytest.raises(PartitionError, match="at least 1 stage, got 0"):
        minimax([1.0], 0)


def test_by_hand_accepts_what_fits():
    assert check_given_cut((2, 1), 3, 2) == [2, 1]
    assert check_given_cut([3, 0], 3, 2, allow_empty=True) == [3, 0]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 1], r"expected 3 numbers of layers, got 2 in \[2, 1\]"),
        ([2, 2, 2], r"has 5 layers, got 6 = 2 \+ 2 \+ 2; change the numbers by -1"),
        ([5, 1, -1], r"invalid stage 2.*got -1"),
        ([5, 0, 0], r"invalid stage 1: expected a whole number of layers, at least 1, got 0"),
        ([2.0, 2, 1], r"invalid stage 0.*got 2\.0"),
        ([True, 3, 1], r"invalid stage 0.*got True"),
    ],
)
def test_by_hand_refuses_what_does_not(counts: list, message: str):
    with pytest.raises(PartitionError, match=message):
        check_given_cut(counts, 5, 3)
