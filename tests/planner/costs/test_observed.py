"""What is read off a measured step is what the links were that it ran over."""

from dataclasses import replace

import pytest

from gpipe_hpc.planner.costs.observed import (
    ObservedTransfer,
    fitted,
    gap_s,
    message_of,
    pass_of,
    sums,
    transfers,
    without_clock_offsets,
)
from gpipe_hpc.planner.costs.prices import PassCost, Prices
from gpipe_hpc.schedule import Action, Cluster, Costs, Event, Link, Op, Timeline, build, simulate
from gpipe_hpc.schedule.table.actions import COMPUTE

GAP_S, LINK = 2e-5, Link(1e-4, 2e9)
SIZES = [1e6, 4e6, 1e6, 0.0]
COSTS = Costs(forward=3e-3, backward=6e-3, boundary_bytes=SIZES, link=LINK)


def sent(maker, user):
    return SIZES[min(maker.stage, user.stage)]


def recorded(costs=COSTS, schedule="one_f_one_b", gap=GAP_S):
    """Return a step as a run records it: compute alone, and a gap behind each action."""
    table = build(schedule, ranks=4, microbatches=8)
    timeline = simulate(table, Prices(action_s=gap).of_actions(costs))
    rows = tuple(
        tuple(e._replace(end_s=e.end_s - gap) for e in row if e.action.op in COMPUTE)
        for row in timeline.events
    )
    return replace(timeline, events=rows)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_the_link_of_a_step_is_found_again(schedule):
    step = recorded(schedule=schedule)
    gap = gap_s([step])
    assert gap == pytest.approx(GAP_S, rel=0.1)
    taken = list(transfers(step, sent, 4, gap))
    assert len(taken) >= 6
    assert {each.source for each in taken} | {e.destination for e in taken} == {4, 5, 6, 7}
    found = fitted([(each.nbytes, each.seconds) for each in taken])
    assert found.num_sizes == 2 and found.num_samples == len(taken)
    assert found.link.latency == pytest.approx(LINK.latency, rel=0.1)
    assert found.link.bandwidth == pytest.approx(LINK.bandwidth, rel=0.1)


def test_a_late_receiver_tells_nothing_of_the_link():
    """What lies there when a slow rank comes took less than until it came."""
    slow = recorded(
        replace(COSTS, forward=[1e-3, 9e-3, 1e-3, 1e-3], backward=[2e-3, 18e-3, 2e-3, 2e-3])
    )
    taken = list(transfers(slow, sent, 0, gap_s([slow])))
    assert taken
    for each in taken:
        own = LINK.latency + each.nbytes / LINK.bandwidth
        assert each.seconds == pytest.approx(own, rel=0.1)


def test_one_size_tells_no_latency():
    found = fitted([(1e6, 1e-3)] * 3)
    assert (found.link.latency, found.num_sizes) == (0.0, 1)
    assert found.link.bandwidth == pytest.approx(1e9)
    nearly = fitted([(1e6, 1e-3), (1.2e6, 1.2e-3)])
    assert nearly.link.latency == 0 and nearly.link.bandwidth == pytest.approx(1e9)
    assert fitted([]) is None and fitted([(0.0, 1.0)]) is None


def test_noise_makes_no_link_that_gets_faster_with_more_bytes():
    assert fitted([(1e6, 2e-3), (2e6, 1e-3)]).link == Link(1.5e-3, float("inf"))
    assert fitted([(1e6, 1e-3), (4e6, 8e-3)]).link.latency == 0


def test_clocks_of_hosts_fall_out_of_both_ways():
    ahead_s = 5e-3
    taken = [
        ObservedTransfer(0, 1, 1e6, 2e-3 + ahead_s),
        ObservedTransfer(1, 0, 1e6, 2e-3 - ahead_s),
        ObservedTransfer(1, 2, 9.0, 1.0),
    ]
    assert without_clock_offsets(taken) == [(1e6, pytest.approx(2e-3))] * 2


def test_a_sum_counts_from_when_all_had_begun():
    """Two copies of two stages; the second bucket left while the first was under way."""
    sizes = [[8e6, 2e6], [4e6]]

    def event(rank, stage, bucket, start_s, end_s):
        return Event(rank, Action(Op.REDUCE_GRAD, stage, bucket), start_s, end_s)

    def replica(late_s):
        rows = (
            (event(0, 0, 0, late_s, 1.4), event(0, 0, 1, 1.1, 1.5)),
            (event(1, 1, 0, late_s, 1.2),),
        )
        return Timeline(rows, 2, 1)

    found = list(sums([replica(0.5), replica(1.0)], sizes, 2))
    told = {(each.ranks, each.nbytes): each.seconds for each in found}
    assert told == {
        ((0, 2), 8e6): pytest.approx(0.4),
        ((0, 2), 2e6): pytest.approx(0.1),
        ((1, 3), 4e6): pytest.approx(0.2),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_a_message_of_a_sum_makes_the_sum_again(size):
    cluster = Cluster((size,), LINK, LINK)
    ranks = tuple(range(size))
    sizes = [[3e7, 6e7, 1.2e8]]
    rows, now = [], 0.0
    for bucket, nbytes in enumerate(sizes[0]):
        took = cluster.reduction_time(ranks, nbytes).total_s
        rows.append(Event(0, Action(Op.REDUCE_GRAD, 0, bucket), now, now + took))
        now += took
    found = fitted(
        [message_of(each) for each in sums([Timeline((tuple(rows),), 1, 1)] * size, sizes, 1)]
    )
    assert found.link.latency == pytest.approx(LINK.latency, rel=0.1)
    assert found.link.bandwidth == pytest.approx(LINK.bandwidth, rel=0.1)


def test_a_pass_is_what_ranks_took():
    true = PassCost(0.0, 2e-6, 3e-10)
    ranks = [(n, e, true.seconds(n, e)) for n, e in ((10, 1e6), (40, 2e6), (5, 8e6))]
    found = pass_of(ranks)
    assert found == pytest.approx(true)
    assert pass_of([(10, 1e6, 1e-3)] * 2) == pytest.approx(PassCost(0.0, 0.0, 1e-9))
    assert pass_of([(0, 0.0, 1e-3)]) == PassCost()
