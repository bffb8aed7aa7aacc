"""Steps held in memory: which, how many, and how they come together."""

from array import array

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.engine.recorder import ActionTimes
from gpipe_hpc.schedule import Costs, build, simulate
from gpipe_hpc.trainer.traces.recorded_steps import (
    RecordedStep,
    RecordedSteps,
    gather_steps,
    timelines_of,
)

SCHEDULE = build("gpipe", ranks=2, microbatches=3)


def timeline(pace):
    return simulate(SCHEDULE, Costs(forward=pace, backward=2 * pace))


def moments_of(events, later_s):
    seconds = (m + later_s for e in events for m in (e.start_s, e.end_s))
    return ActionTimes(tuple(e.action for e in events), array("d", seconds))


def hold(held, step, pace, rank=0, origin_s=0.0):
    measured = timeline(pace)
    if held.wants(step):
        moments = moments_of(measured.events[rank], origin_s)
        held.take(RecordedStep(step, measured.makespan, moments, origin_s))


def test_the_last_steps_are_held_and_no_more():
    held = RecordedSteps(3)
    for step in range(1, 1000):
        hold(held, step, 1.0)
    assert [each.step for each in held.steps] == [997, 998, 999]


def test_the_first_steps_from_one_on_are_held_and_no_more():
    held = RecordedSteps(3, first_step=5)
    for step in range(1, 20):
        hold(held, step, 1.0)
    assert [each.step for each in held.steps] == [5, 6, 7]


def test_nothing_is_held_where_nothing_is_wanted():
    for held in (RecordedSteps(0), RecordedSteps(0, first_step=2)):
        assert not any(held.wants(step) for step in range(1, 9))
        assert held.median is None


def test_the_median_step_is_typical_not_the_second():
    """The second step was drawn, though it is not typical."""
    held = RecordedSteps(20)
    for step, pace in enumerate([9.0, 7.0, 1.0, 1.2, 1.1, 5.0, 1.3], start=1):
        hold(held, step, pace)
    assert held.median.step == 7
    hold(held, 8, 1.25)
    assert held.median.step == 8  # the faster of the two in the middle
    assert held.median.moments.busy_s == 3 * 3 * 1.25


def test_rank_0_gathers_the_rows_of_all_replicas_on_one_clock():
    """Two replicas of two ranks; the hosts' clocks are hours apart."""

    def body(world):
        held, origin_s = RecordedSteps(4), 5000.0 * world.rank
        for step, pace in ((1, 4.0), (2, 1.0), (3, 2.0)):
            measured = timeline(pace)
            late_s = 0.5 * (world.rank // 2)
            moments = moments_of(measured.events[world.rank % 2], late_s + origin_s)
            held.take(RecordedStep(step, measured.makespan + 0.5, moments, origin_s))
        return gather_steps(world.world_group, held.steps, held.median, num_stage_ranks=2)

    first, *others = run_on_threads(4, body)
    assert others == [[], [], []]
    assert [(each.step, each.is_median) for each in first] == [(1, False), (2, False), (3, True)]
    for each, pace in zip(first, (4.0, 1.0, 2.0), strict=True):
        one, other = timelines_of(each, [SCHEDULE] * 2)
        assert one.events == timeline(pace).events
        assert other.start_s == 0.5 and other.bubble == one.bubble
        assert each.pipeline_s == one.makespan + 0.5
