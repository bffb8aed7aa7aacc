"""A whole job in little: replicas that meet in reductions, against all of them as one table."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.schedule import (
    Action,
    Costs,
    Link,
    Op,
    ScheduleError,
    build,
    check,
    lower,
    side_by_side,
    simulate,
    simulate_job,
)
from gpipe_hpc.schedule.table.actions import OF_BUCKETS

COSTS = Costs(forward=1, backward=2, input_gradient=1, weight_gradient=1, reduction=3)
CASES = [
    ("one_f_one_b", {}),
    ("interleaved", {"stages_per_rank": 2}),
    ("zb_v", {}),
    ("chimera", {}),
    ("gems", {}),
]


def back(action, count):
    """Return an action of the whole job as the one of its replica."""
    is_one = action.op not in OF_BUCKETS
    return action._replace(microbatch=action.microbatch % count) if is_one else action


def jointly(schedule, each):
    """Return the events of each replica, all simulated together, one event after the other."""
    ranks, count = schedule.num_ranks, schedule.num_microbatches
    links, paces = {}, {}
    for replica, costs in enumerate(each):
        base = replica * ranks
        links |= {(base + a, base + b): link for (a, b), link in costs.links.items()}
        paces |= {base + rank: pace for rank, pace in costs.paces.items()}
    table = side_by_side(schedule, len(each))
    timeline = simulate(table, replace(each[0], links=links, paces=paces))
    rows = [
        tuple((back(e.action, count), e.start_s, e.end_s) for e in timeline.events[rank])
        for rank in range(len(each) * ranks)
    ]
    return timeline, [rows[at : at + ranks] for at in range(0, len(rows), ranks)]


paces = st.dictionaries(st.integers(0, 3), st.floats(0.5, 3), max_size=3)
links = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.builds(Link, latency=st.floats(0, 2), bandwidth=st.floats(0.5, 9)),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CASES),
    st.integers(2, 6),
    st.lists(st.tuples(paces, links), min_size=1, max_size=4),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_job_is_all_its_replicas_simulated_together(case, microbatches, places, buckets, within):
    """Every time of every action, bit for bit, as if the job were one table of all ranks."""
    name, options = case
    bare = build(name, ranks=4, microbatches=2 * microbatches, **options)
    schedule = lower(bare, dict.fromkeys(range(0, bare.num_stages, 2), buckets))
    base = replace(
        COSTS,
        boundary_bytes=1.7,
        link=Link(0.1, 3.0),
        reduction=[1.3 + stage for stage in range(bare.num_stages)],
        reduction_latency=0.3,
        reduces_within=within,
    )
    each = [replace(base, paces=own, links=between) for own, between in places]
    job = simulate_job(schedule, each)
    timeline, rows = jointly(schedule, each)
    assert job.makespan == timeline.makespan
    assert job.end_of_compute == timeline.end_of_compute
    assert job.bubble == pytest.approx(timeline.bubble, abs=1e-12)
    assert tuple(busy for one in job.replicas for busy in one.busy) == timeline.busy
    for replica, expected in enumerate(rows):
        found = job.timeline(replica)
        assert [[(e.action, e.start_s, e.end_s) for e in row] for row in found.events] == [
            list(row) for row in expected
        ]


@pytest.mark.parametrize("name", ["one_f_one_b", "dualpipe_v", "chimera"])
def test_a_job_as_one_table_is_sound(name):
    """Each replica computes what it does alone; bounds and blocks of two come along."""
    schedule = lower(build(name, ranks=4, microbatches=8))
    table = side_by_side(schedule, 3)
    check(table)
    assert table.ranks[:4] == schedule.ranks
    assert [len(row) for row in table.ranks] == 3 * [len(row) for row in schedule.ranks]


def test_one_replica_is_what_the_simulator_says():
    schedule = lower(build("zb_v", ranks=4, microbatches=8))
    assert simulate_job(schedule, [COSTS]).timeline(0) == simulate(schedule, COSTS)


def test_the_slowest_replica_decides_when_a_stage_is_reduced():
    """Its rank 0 takes twice as long, so stage 0 waits for it; stage 1's reduction does less so."""
    bare = build("gpipe", ranks=2, microbatches=2)
    slow = replace(COSTS, paces={0: 2.0})
    job = simulate_job(bare, [COSTS, slow, COSTS])
    alone = [simulate(lower(bare), each) for each in (COSTS, slow)]
    ends = {m.action.stage: m for m in job.meetings}
    assert ends[0].ready == alone[1].end_of_compute > alone[0].end_of_compute
    assert (ends[0].last, job.slowest) == (1, 1)
    assert job.makespan == ends[0].end == ends[0].ready + 3
    assert job.reduction_share == pytest.approx(3 / job.makespan)


def test_reductions_that_take_no_time_add_nothing():
    job = simulate_job(build("gpipe", ranks=2, microbatches=2), [replace(COSTS, reduction=0)] * 3)
    assert job.reduction_share == 0
    assert job.num_ranks == 6
    assert {m.action for m in job.meetings} == {Action(Op.REDUCE_GRAD, s) for s in (0, 1)}


def test_a_job_without_replicas_is_refused():
    with pytest.raises(ScheduleError, match="job: costs is empty"):
        simulate_job(build("gpipe", ranks=2, microbatches=2), [])
