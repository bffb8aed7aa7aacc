import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.schedule import Costs, Link, build, explain_bubble, lower, simulate


def test_equal_stages_only_fill_and_drain():
    causes = explain_bubble(build("gpipe", ranks=4, microbatches=6), Costs(forward=1, backward=2))
    assert causes.fill_and_drain == pytest.approx(3 / 9)
    assert causes[1:] == (0, 0, 0)


def test_a_slow_stage_is_imbalance():
    """The slow stage is never idle but for the fill and drain of the others: 3 of 2 x 33."""
    bare = build("gpipe", ranks=2, microbatches=5)
    causes = explain_bubble(bare, Costs(forward=[1, 2], backward=[2, 4]))
    total = 2 * (5 * 6 + 3)
    assert causes.imbalance == pytest.approx((30 - 15) / total)
    assert causes.fill_and_drain == pytest.approx(3 * 2 / total)


def test_transfers_and_the_reduction_tail_are_told_apart():
    lowered = lower(build("gpipe", ranks=2, microbatches=1))
    costs = Costs(forward=1, backward=2, send=10, reduction=[7, 100])
    causes = explain_bubble(lowered, costs)
    end_of_compute, end = 6 + 20, 1 + 10 + 1 + 2 + 100
    assert causes.transfers == pytest.approx(20 / end)
    assert causes.reduction_tail == pytest.approx((end - end_of_compute) / end)
    assert sum(causes) == pytest.approx(simulate(lowered, costs).bubble)


COSTS = st.builds(
    Costs,
    forward=st.lists(st.floats(0, 5), min_size=8, max_size=8),
    input_gradient=st.lists(st.floats(0, 5), min_size=8, max_size=8),
    weight_gradient=st.floats(0, 5),
    send=st.floats(0, 3),
    boundary_bytes=st.floats(0, 100),
    link=st.builds(Link, latency=st.floats(0, 1), bandwidth=st.floats(10, 1000)),
    reduction=st.floats(0, 30),
)


@settings(max_examples=40, deadline=None)
@given(COSTS, st.sampled_from(["interleaved", "zb_v", "hanayo", "v_half"]), st.integers(1, 9))
def test_causes_sum_to_the_bubble_and_none_is_negative(costs, name, microbatches):
    options = {"waves": 1} if name == "hanayo" else {}
    lowered = lower(build(name, ranks=4, microbatches=microbatches, **options))
    causes = explain_bubble(lowered, costs)
    assert sum(causes) == pytest.approx(simulate(lowered, costs).bubble, abs=1e-9)
    assert min(causes) >= -1e-9
