"""Why ranks idled: the parts sum to what is idle, with replicas too."""

import pytest

from gpipe_hpc.schedule import Costs, build, lower, simulate
from gpipe_hpc.schedule.passes.gathers import add_gathers
from gpipe_hpc.trainer.summary.figures import RankFigures, idle_of_ranks


def figures(rank, busy_s):
    return RankFigures(rank, rank // 2, rank % 2, (rank % 2,), "host", "cpu", busy_s, 10, 5)


def test_causes_of_all_ranks_of_all_replicas_sum_to_their_idle_time():
    bare = build("one_f_one_b", ranks=2, microbatches=4)
    fast, slow = (
        simulate(bare, Costs(forward=[pace, 1.0], backward=[2 * pace, 2.0])) for pace in (1.0, 1.5)
    )
    span_s = slow.makespan + 1.0
    ranks = [figures(rank, (*fast.busy, *slow.busy)[rank]) for rank in range(4)]
    told = idle_of_ranks(ranks, span_s, [fast, slow])
    for each, own in zip(told, ranks, strict=True):
        assert each["idle_s"] == span_s - own.busy_s
        assert sum(each["idle_causes"].values()) == pytest.approx(each["idle_s"])
    assert told[0]["idle_causes"]["other_replicas_s"] == span_s - fast.makespan
    assert told[2]["idle_causes"]["other_replicas_s"] == pytest.approx(1.0)
    assert told[2]["idle_causes"]["imbalance_s"] == 0.0
    assert told[3]["idle_causes"]["imbalance_s"] == pytest.approx(4 * 1.5)


@pytest.mark.parametrize("beyond_s", [0.0, 3.0, 50.0])
def test_what_reductions_take_behind_all_compute_is_idle_time(beyond_s):
    """Up to the end of the pipeline's time: what other replicas compute meanwhile is theirs."""
    lowered = lower(build("gpipe", ranks=2, microbatches=1))
    timeline = simulate(lowered, Costs(forward=1, backward=2, reduction=[7, 20]))
    pipeline_s = 6 + beyond_s
    ranks = [figures(rank, timeline.busy[rank]) for rank in range(2)]
    for each in idle_of_ranks(ranks, pipeline_s, [timeline]):
        causes = each["idle_causes"]
        tail_s = timeline.makespan - 6
        assert causes["reduction_tail_s"] == pytest.approx(min(tail_s, beyond_s))
        assert causes["other_replicas_s"] == pytest.approx(max(0.0, beyond_s - tail_s))
        assert sum(causes.values()) == pytest.approx(each["idle_s"])


def test_what_is_gathered_ahead_of_all_compute_is_no_part_of_the_pipelines_time():
    """The other replicas' part of the idle time was below 0 there."""
    lowered = add_gathers(lower(build("gpipe", ranks=2, microbatches=1)), {0: 1, 1: 1})
    timeline = simulate(lowered, Costs(forward=1, backward=2, gather=0.5))
    ranks = [figures(rank, timeline.busy[rank]) for rank in range(2)]
    assert timeline.makespan == 6.5
    for each in idle_of_ranks(ranks, 6.0, [timeline]):
        causes = each["idle_causes"]
        assert min(causes.values()) >= 0.0
        assert sum(causes.values()) == pytest.approx(each["idle_s"])


def test_what_is_not_known_is_not_said():
    (told,) = idle_of_ranks([figures(0, 2.0)], 5.0, [])
    assert told == {"busy_s": 2.0, "idle_s": 3.0, "idle_causes": None}
    (told,) = idle_of_ranks([figures(0, None)], 5.0, [])
    assert told["idle_s"] is None
