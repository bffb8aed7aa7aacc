"""A measured run beside its simulation."""

import random

import pytest

from gpipe_hpc.schedule import Costs, Timeline, mean_costs, schedule_of, simulate
from gpipe_hpc.visualize.comparison import compare, time_by_kind
from tests.support import measured_run as run_of


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
