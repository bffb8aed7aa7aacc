import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpipe_hpc.schedule import (
    Costs,
    Event,
    Link,
    Timeline,
    build,
    explain_bubble,
    explain_measured,
    lower,
    parse_action,
    simulate,
)
from gpipe_hpc.schedule.table.actions import COMPUTE


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


def measured(timeline):
    """Return a timeline as a run records it: compute alone, on a clock that began long ago."""
    rows = tuple(
        tuple(
            e._replace(start_s=100 + e.start_s, end_s=100 + e.end_s)
            for e in row
            if e.action.op in COMPUTE
        )
        for row in timeline.events
    )
    return replace(timeline, events=rows)


@settings(max_examples=40, deadline=None)
@given(COSTS, st.sampled_from(["interleaved", "zb_v", "hanayo", "v_half"]), st.integers(1, 9))
def test_a_measured_step_is_explained_as_a_simulated_one(costs, name, microbatches):
    """One definition: replayed without transfers, the order takes what the simulator says."""
    options = {"waves": 1} if name == "hanayo" else {}
    bare = build(name, ranks=4, microbatches=microbatches, **options)
    costs = replace(costs, reduction=0.0)
    simulated = simulate(lower(bare), costs)
    assume(simulated.makespan > 1e-3)  # less is lost on a clock that began long ago
    timeline = measured(simulated)
    ranks = explain_measured(timeline)
    for own, busy in zip(ranks, timeline.busy, strict=True):
        assert sum(own) == pytest.approx(timeline.makespan - busy, abs=1e-9)
        assert min(own) >= -1e-9
    total = timeline.makespan * timeline.num_ranks
    shares = [sum(part) / total for part in zip(*ranks, strict=True)]
    assert shares == pytest.approx(list(explain_bubble(lower(bare), costs)), abs=1e-9)
    assert sum(shares) == pytest.approx(timeline.bubble, abs=1e-9)


def test_time_that_no_action_explains_counts_as_transfers():
    """Rank 1 begins its F 2 after it could, and its B 1 after; rank 0 its B 1 after."""
    times = {"0F0": (0, 1), "1F0": (3, 4), "1B0": (5, 7), "0B0": (8, 10)}
    events = [Event(int(name[0]), parse_action(name), *span) for name, span in times.items()]
    rows = tuple(tuple(e for e in events if e.rank == rank) for rank in (0, 1))
    assert explain_measured(Timeline(rows, 2, 1)) == ((3, 0, 4, 0), (3, 0, 4, 0))
    assert explain_measured(Timeline(((), ()), 2, 1)) == ((0, 0, 0, 0), (0, 0, 0, 0))


def test_empty_micro_batches_that_never_ran_are_waited_for_by_nobody():
    timeline = measured(simulate(build("gpipe", ranks=2, microbatches=3), Costs(1, 2)))
    rows = tuple(tuple(e for e in row if e.action.microbatch != 1) for row in timeline.events)
    causes = explain_measured(replace(timeline, events=rows))
    assert all(min(own) >= 0 for own in causes)


def test_a_bubble_is_computed_in_one_place(repository):
    """Three places did so, with three totals: metrics, `draw` and `bench` disagreed."""
    computes = re.compile(r"1(\.0)? - .*busy")
    found = [
        path.relative_to(repository).as_posix()
        for folder in ("gpipe_hpc", "benchmarks", "experiments")
        for path in sorted((repository / folder).rglob("*.py"))
        if computes.search(path.read_text())
    ]
    assert found == ["gpipe_hpc/schedule/timeline.py"]
