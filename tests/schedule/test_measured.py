"""From what a run measured to its table, and to what other tables would cost."""

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Event,
    Timeline,
    build,
    check,
    costs_for_others,
    lower,
    mean_costs,
    mean_forwards,
    parse_action,
    recompute_of,
    schedule_of,
    simulate,
)
from tests.support import measured_run as run_of


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "chimera"])
def test_the_table_of_a_run_is_the_one_it_ran(name):
    schedule = build(name, ranks=4, microbatches=6, recompute="always")
    again = schedule_of(run_of(name, recompute="always"))
    assert again.ranks == schedule.ranks
    for stage in range(4):
        for microbatch in range(6):
            wanted = schedule.placement.rank_of(stage, microbatch)
            assert again.placement.rank_of(stage, microbatch) == wanted
    check(lower(again))


def test_a_run_with_empty_micro_batches_is_simulated_without_them():
    full = run_of("gpipe")
    rows = tuple(tuple(e for e in row if e.action.microbatch not in (2, 5)) for row in full.events)
    timeline = Timeline(rows, 4, 6, "gpipe")
    again = simulate(schedule_of(timeline), mean_costs(timeline))
    assert sum(len([e for e in row if e.action.op == "F"]) for row in again.events) == 4 * 4


def test_a_run_whose_weight_gradients_were_empty_is_simulated_without_them():
    full = run_of("zb_h1")
    rows = tuple(tuple(e for e in row if e.action != parse_action("1W3")) for row in full.events)
    timeline = Timeline(rows, 4, 6, "zb_h1")
    again = simulate(schedule_of(timeline), mean_costs(timeline))
    assert [len(row) for row in again.events] == [18, 17, 18, 18]


def test_mean_costs_are_those_of_op_and_stage():
    run = run_of("zb_h1")
    costs = mean_costs(run)
    assert costs.forward == pytest.approx([1, 2, 1, 3])
    assert costs.input_gradient == pytest.approx([2] * 4)
    assert costs.weight_gradient == pytest.approx([1, 1, 2, 1])
    assert costs.recompute == costs.backward == [0] * 4
    rows = ((Event(0, parse_action("0F0"), 0, 1), Event(0, parse_action("0F1"), 1, 4)),)
    assert mean_costs(Timeline(rows, 1, 2)).forward == [2]


def test_what_never_ran_is_filled_in_for_other_schedules():
    costs = costs_for_others(run_of("one_f_one_b", Costs(forward=[1, 2, 1, 3], backward=6)))
    assert costs.input_gradient == costs.weight_gradient == pytest.approx([3] * 4)
    assert costs.recompute == pytest.approx([1, 2, 1, 3])
    split = costs_for_others(run_of("zb_h1", recompute="always"))
    assert split.backward == pytest.approx([3, 3, 4, 3])
    assert split.recompute == pytest.approx([1] * 4)


def test_other_schedules_leave_out_what_was_empty():
    full = run_of("gpipe", Costs(forward=1, backward=2))
    rows = tuple(tuple(e for e in row if e.action.microbatch < 4) for row in full.events)
    costs = costs_for_others(Timeline(rows, 4, 6, "gpipe"))
    assert costs.shares == [1, 1, 1, 1, 0, 0]
    again = simulate(build("one_f_one_b", ranks=4, microbatches=6), costs)
    assert again.makespan == pytest.approx(3 * (4 + 3))


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_a_timeline_shows_what_was_recomputed(mode):
    assert recompute_of(run_of("one_f_one_b", recompute=mode)) == mode


def test_bare_forwards_are_told_apart():
    """Those of micro-batches that are recomputed keep nothing: they take another time."""
    table = build("gpipe", ranks=2, microbatches=3, recompute="except_last")
    costs = Costs(forward=2, bare_forward=1, backward=3, recompute=2.5)
    timeline = simulate(table, costs)
    assert mean_forwards(timeline) == ([None, 2.0], [1.0, 1.0])
    means = mean_costs(timeline)
    assert means.forward == [1.0, 2.0] and means.bare_forward == [1.0, 1.0]
    assert simulate(schedule_of(timeline), means).makespan == timeline.makespan
    whole = simulate(table, Costs(forward=2, backward=3, recompute=2.5))
    assert timeline.makespan < whole.makespan
