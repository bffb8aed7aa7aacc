"""List scheduling: what its rules mean."""

from gpipe_hpc.schedule import Op, place
from gpipe_hpc.schedule.search.list_scheduling import Rules, list_schedule


def test_a_slow_rank_is_as_a_slow_stage_where_each_rank_has_one():
    """With its rank twice as slow, stage 1 comes to other orders than when all are even."""
    placement = place("one_each", 3, 5)
    even = Rules(
        {op: [1.0, 1.0, 1.0] for op in (Op.I, Op.F, Op.W)},
        lambda op, _, microbatch: ((Op.I, Op.F, Op.W).index(op), microbatch),
        [0.0, 0.0, 0.0],
    )
    by_rank = list_schedule(placement, even._replace(paces=[1.0, 2.0, 1.0]))
    slow = {op: [1.0, 2.0, 1.0] for op in even.durations}
    assert by_rank == list_schedule(placement, even._replace(durations=slow))
    assert by_rank != list_schedule(placement, even)
