"""A measured run beside its simulation."""

import random

import pytest

from gpipe_hpc.drawing.comparison import compare, mean_costs, schedule_of, time_by_kind
from gpipe_hpc.schedule import Costs, Event, Timeline, build, check, lower, parse_action, simulate

COSTS = Costs(
    forward=[1, 2, 1, 3], input_gradient=2, weight_gradient=[1, 1, 2, 1], recompute=1, send=0.5
)


def run_of(name, costs=COSTS, recompute="never", start_s=100.0):
    """Return a timeline as a run has it: compute alone, on a clock that starts anywhere."""
    timeline = simulate(build(name, ranks=4, microbatches=6, recompute=recompute), costs)
    rows = tuple(
        tuple(
            event._replace(start_s=event.start_s + start_s, end_s=event.end_s + start_s)
            for event in row
        )
        for row in timeline.events
    )
    return Timeline(rows, timeline.num_stages, timeline.num_microbatches, name)


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


def test_a_run_without_delays_equals_its_simulation():
    """Where costs do not vary and transfers are free, nothing is left to explain."""
    costs = Costs(forward=[1, 2, 1, 3], backward=[2, 4, 2, 6])
    run = run_of("one_f_one_b", costs)
    planned = simulate(schedule_of(run), mean_costs(run))
    assert planned.makespan == pytest.approx(run.makespan)
    assert all(float(line[-1]) == pytest.approx(0, abs=1e-9) for line in compare(run, planned)[1:])


def test_times_by_kind_sum_to_the_time_of_all_ranks():
    spent = time_by_kind(run_of("zb_h1"))
    run = run_of("zb_h1")
    assert sum(one.busy_s + one.idle_s for one in spent.values()) == pytest.approx(4 * run.makespan)
    assert sum(one.busy_s for one in spent.values()) == pytest.approx(sum(run.busy))
    assert (spent["F"].actions, spent["W"].actions, spent["B"].actions) == (24, 24, 0)


def test_the_difference_stands_at_the_kind_that_is_late():
    run = run_of("gpipe", Costs(forward=1, backward=2))
    # Every backward of the last rank starts half a second late, so all after it do.
    late = [
        event._replace(start_s=event.start_s + 0.5, end_s=event.end_s + 0.5)
        if event.action.op == "B"
        else event
        for row in run.events
        for event in row
    ]
    rows = tuple(tuple(event for event in late if event.rank == rank) for rank in range(4))
    table = compare(Timeline(rows, 4, 6, "late"), run)
    differences = {line[0]: float(line[-1]) for line in table[1:]}
    assert differences == {
        "F forward": 0,
        "B backward": 0.5,
        "after the last action": 0,
        "makespan": 0.5,
    }
    assert table[1][1:4] == ["24", "6", "6"]


def test_differences_by_kind_sum_to_that_of_the_makespan():
    random.seed(0)
    costs = Costs(forward=[random.random() for _ in range(4)], backward=2, send=0.3)
    run = run_of("one_f_one_b", costs)
    table = compare(run, simulate(schedule_of(run), mean_costs(run)))
    *parts, total = (float(line[-1]) for line in table[1:])
    assert sum(parts) == pytest.approx(total, abs=1e-2)
    assert total > 0.1
