"""What actions cost: the same model, cut into another number of stages."""

import pytest

from gpipe_hpc.schedule import Costs, ScheduleError, build, simulate


def test_a_number_is_that_of_a_ranks_share_of_the_model():
    costs = Costs(forward=1, input_gradient=2, weight_gradient=3, send=0.5).recut(4, 8)
    assert (costs.forward, costs.input_gradient, costs.weight_gradient) == (0.5, 1, 1.5)
    assert (costs.backward, costs.send) == (None, 0.5)


def test_a_list_is_by_equal_parts_of_the_model():
    assert Costs(forward=[2, 4], send=[5, 7]).recut(2, 4).forward == [1, 1, 2, 2]
    assert Costs(forward=[2, 4], send=[5, 7]).recut(2, 4).send == [5, 5, 7, 7]
    joined = Costs(forward=[1, 2, 3, 4], send=[5, 6, 7, 8]).recut(2, 2)
    assert (joined.forward, joined.send) == ([3, 7], [6, 8])
    assert Costs(forward=[1, 2]).recut(2, 2).forward == [1, 2]


@pytest.mark.parametrize("parts", [3, 5])
def test_parts_that_stages_do_not_divide_are_refused(parts):
    with pytest.raises(ScheduleError, match=rf"has {parts} values.*the 4 stages"):
        Costs(forward=[1] * parts).recut(2, 4)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb_v", "chimera", "dualpipe_v"])
def test_all_ranks_together_have_the_same_work_under_every_schedule(name):
    table = build(name, ranks=4, microbatches=8)
    parts = [1, 2, 3, 4]
    costs = Costs(forward=parts, input_gradient=parts, weight_gradient=parts)
    timeline = simulate(table, costs.recut(4, table.num_stages))
    assert sum(timeline.busy) == 8 * 30
