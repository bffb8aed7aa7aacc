from dataclasses import replace

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Event,
    Link,
    Op,
    ScheduleError,
    Timeline,
    build,
    forward_only,
    from_text,
    lower,
    parse_action,
    simulate,
)

SPLIT = from_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")


def spans(timeline):
    return {str(e.action): (e.start_s, e.end_s) for row in timeline.events for e in row}


@pytest.mark.parametrize("schedule", [SPLIT, lower(SPLIT)], ids=["bare", "lowered"])
def test_input_gradients_release_the_previous_stage_and_weight_gradients_do_not(schedule):
    costs = Costs(forward=[1, 2], input_gradient=[3, 4], weight_gradient=5, send=0.5)
    found = spans(simulate(schedule, costs))
    assert found["1F0"] == (1.5, 3.5)
    assert found["1I0"] == (3.5, 7.5)
    assert found["0I0"] == (8, 11)
    assert found["1W0"] == (7.5, 12.5)
    assert found["0W0"] == (11, 16)


def test_a_full_backward_without_a_cost_of_its_own_costs_both_halves():
    bare = from_text("0F0,0B0\n")
    costs = Costs(forward=1, input_gradient=2, weight_gradient=4)
    assert simulate(bare, costs).makespan == 7
    assert simulate(bare, Costs(forward=1, backward=3)).makespan == 4


@pytest.mark.parametrize(
    ("text", "costs", "missing"),
    [
        ("0F0", Costs(backward=1), "forward"),
        ("0F0,0B0", Costs(forward=1), "input_gradient"),
        ("0F0,0I0,0W0", Costs(forward=1, backward=1, input_gradient=1), "weight_gradient"),
        ("0F0,0R0,0B0", Costs(forward=1, backward=1), "recompute"),
    ],
)
def test_an_op_without_a_cost_is_refused(text, costs, missing):
    with pytest.raises(ScheduleError, match=f"set {missing}"):
        simulate(from_text(text), costs)


@pytest.mark.parametrize("cost", [[1.0], [1.0, 2.0, 3.0], -1.0, float("nan"), float("inf")])
def test_costs_that_make_no_sense_are_refused(cost):
    with pytest.raises(ScheduleError, match="costs: forward"):
        simulate(build("gpipe", ranks=2, microbatches=1), Costs(forward=cost, backward=1))


def test_transfers_of_a_channel_go_one_after_the_other_and_overlap_compute():
    """Three quick forwards, a slow channel: the receiver is fed every three units."""
    timeline = simulate(
        lower(forward_only(build("gpipe", ranks=2, microbatches=3))), Costs(forward=1, send=3)
    )
    found = spans(timeline)
    assert [found[f"0F{m}"] for m in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert [found[f"0SEND_F{m}"] for m in range(3)] == [(1, 4), (4, 7), (7, 10)]
    assert [found[f"1F{m}"] for m in range(3)] == [(4, 5), (7, 8), (10, 11)]
    assert found["1RECV_F0"] == (0, 4)


def test_the_cost_of_a_transfer_is_that_of_the_boundary_it_crosses():
    costs = Costs(forward=1, backward=1, send=[10, 100, 1000])
    assert simulate(build("gpipe", ranks=3, microbatches=1), costs).makespan == 6 + 2 * 110


def test_links_have_a_latency_and_a_bandwidth_of_their_own():
    """Three ranks in a row; the second link is slow, and slower still on the way back."""
    links = {(1, 2): Link(latency=1, bandwidth=10), (2, 1): Link(latency=2, bandwidth=5)}
    costs = Costs(
        forward=1, backward=1, boundary_bytes=[100, 20, 0], link=Link(0.5, 100), links=links
    )
    bare = build("gpipe", ranks=3, microbatches=1)
    for schedule in (bare, lower(bare)):
        found = spans(simulate(schedule, costs))
        assert found["1F0"][0] == 1 + 0.5 + 1
        assert found["2F0"][0] == 3.5 + 1 + 2
        assert found["1B0"][0] == 8.5 + 2 + 4
        assert found["0B0"][0] == 15.5 + 0.5 + 1


def test_transfers_share_the_link_between_two_ranks():
    """Rank 0 makes two values for rank 1, of two channels; the second waits for the first."""
    crossing = from_text("0F0,1F1,2F0\n0F1,1F0,2F1\n")
    costs = Costs(forward=1, link=Link(latency=5), links={(1, 0): Link()})
    for schedule in (crossing, lower(crossing)):
        found = spans(simulate(schedule, costs))
        assert found["1F1"] == (1, 2)
        assert found["1F0"] == (6, 7)
        assert found["2F1"] == (11, 12)


@pytest.mark.parametrize("bandwidth", [0, -1, float("nan")])
def test_links_that_make_no_sense_are_refused(bandwidth):
    with pytest.raises(ScheduleError, match="a link needs a latency"):
        Link(latency=0, bandwidth=bandwidth)


def test_reductions_overlap_compute_and_run_one_at_a_time():
    """One rank holds two stages; the first reduction starts under a backward, the second waits."""
    lowered = lower(from_text("0F0,1F0,1B0,0B0\n"))
    timeline = simulate(lowered, Costs(forward=1, backward=2, reduction=[4, 5]))
    found = spans(timeline)
    assert found["1REDUCE_GRAD"] == (4, 9)
    assert found["0B0"] == (4, 6)
    assert found["0REDUCE_GRAD"] == (9, 13)
    assert (timeline.makespan, timeline.busy) == (13, (6,))


def test_buckets_share_the_reduction_and_may_leave_within_the_last_backward():
    """The first is complete after a quarter of it; the second waits for the first one's sum."""
    lowered = lower(from_text("0F0,0B0\n"), {0: 2})
    costs = Costs(forward=1, backward=4, reduction=8, bucket_shares={0: [1, 3]})
    found = spans(simulate(lowered, costs))
    assert found["0REDUCE_GRAD0"] == (5, 7) and found["0REDUCE_GRAD1"] == (7, 13)
    found = spans(simulate(lowered, replace(costs, reduces_within=True)))
    assert found["0REDUCE_GRAD0"] == (2, 4) and found["0REDUCE_GRAD1"] == (5, 11)
    found = spans(simulate(lowered, Costs(forward=1, backward=4, reduction=8)))
    assert found["0REDUCE_GRAD0"] == (5, 9) and found["0REDUCE_GRAD1"] == (9, 13)
    with pytest.raises(
        ScheduleError, match="bucket_shares of stage 0 need one amount of 0 or more for"
    ):
        simulate(lowered, replace(costs, bucket_shares={0: [1]}))


def test_a_mirrored_reduction_starts_when_its_last_holder_is_ready():
    timeline = simulate(
        lower(build("gems", ranks=2, microbatches=2)), Costs(forward=1, backward=2, reduction=10)
    )
    starts = [
        {str(e.action): e.start_s for e in row if e.action.op is Op.REDUCE_GRAD}
        for row in timeline.events
    ]
    assert starts[0] == starts[1]
    ends = [max(e.end_s for e in row if e.action.op is Op.B) for row in timeline.events]
    assert starts[0] == {"1REDUCE_GRAD": ends[0], "0REDUCE_GRAD": ends[0] + 10}


def test_recomputation_runs_ahead_of_the_gradients_arrival():
    bare = build("gpipe", ranks=2, microbatches=1, recompute="always")
    found = spans(simulate(bare, Costs(forward=1, backward=2, recompute=1)))
    assert found["0R0"] == (1, 2)
    assert found["0B0"][0] == found["1B0"][1] == 5


def test_a_deadlock_is_refused():
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(from_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"), Costs(forward=1, backward=1))


def test_a_measured_timeline_may_start_anywhere_and_hold_a_reduction_tail():
    rows = [("0F0", 100.0, 101.0), ("0SEND_F0", 101.0, 103.0), ("0B0", 104.0, 106.0)]
    other = [("1F0", 103.0, 103.5), ("1B0", 103.5, 104.0), ("1REDUCE_GRAD", 104.0, 110.0)]
    timeline = Timeline(
        events=tuple(
            tuple(Event(rank, parse_action(text), start, end) for text, start, end in row)
            for rank, row in enumerate((rows, other))
        ),
        num_stages=2,
        num_microbatches=1,
    )
    assert timeline.makespan == 10
    assert timeline.busy == (3, 1)
    assert timeline.bubble == pytest.approx(1 - 4 / 20)
    assert timeline.peak_activations == (1, 1)


def test_weight_gradients_hold_activations_until_they_are_done():
    costs = Costs(forward=1, input_gradient=1, weight_gradient=1)
    assert simulate(from_text("0F0,0I0,0F1,0I1,0W0,0W1\n"), costs).peak_activations == (2,)
    assert simulate(from_text("0F0,0I0,0W0,0F1,0I1,0W1\n"), costs).peak_activations == (1,)


def test_nothing_is_kept_in_evaluation_and_an_empty_timeline_has_no_bubble():
    bare = forward_only(build("gpipe", ranks=2, microbatches=5))
    assert simulate(bare, Costs(forward=1)).peak_activations == (1, 1)
    empty = Timeline(events=((), ()), num_stages=2, num_microbatches=1)
    assert (empty.makespan, empty.bubble, empty.peak_activations) == (0.0, 0.0, (0, 0))


@pytest.mark.parametrize("schedule", [SPLIT, lower(SPLIT)], ids=["bare", "lowered"])
def test_a_slow_rank_takes_as_many_times_as_long_for_compute_and_for_nothing_else(schedule):
    costs = Costs(
        forward=1, input_gradient=2, weight_gradient=3, send=0.5, reduction=7, paces={1: 2.0}
    )
    found = spans(simulate(schedule, costs))
    assert found["0F0"] == (0, 1)
    assert found["1F0"] == (1.5, 3.5)
    assert found["1I0"] == (3.5, 7.5)
    assert found["1W0"] == (7.5, 13.5)
    assert found["0I0"] == (8, 10)
    if schedule.is_lowered:
        assert found["1REDUCE_GRAD"] == (13.5, 20.5)


@pytest.mark.parametrize("paces", [{2: 1.5}, {-1: 1.0}, {0: 0.0}, {0: float("inf")}])
def test_paces_that_make_no_sense_are_refused(paces):
    with pytest.raises(ScheduleError, match="costs: paces must be factors above 0 for ranks of"):
        simulate(SPLIT, Costs(forward=1, input_gradient=1, weight_gradient=1, paces=paces))


def test_each_bucket_takes_the_latency_of_a_reduction():
    lowered = lower(from_text("0F0,0B0\n"), {0: 2})
    costs = Costs(forward=1, backward=4, reduction=8, reduction_latency=[0.5])
    found = spans(simulate(lowered, costs))
    assert found["0REDUCE_GRAD0"] == (5, 9.5) and found["0REDUCE_GRAD1"] == (9.5, 14)
