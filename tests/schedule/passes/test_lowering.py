from collections import defaultdict

import pytest

from gpipe_hpc.schedule import (
    Op,
    Placement,
    Schedule,
    ScheduleError,
    build,
    check,
    forward_only,
    from_text,
    lower,
    parse_action,
)
from gpipe_hpc.schedule.table.actions import RECEIVES, SENDS
from gpipe_hpc.schedule.table.dependencies import counterpart

COMPUTE = {Op.F, Op.B, Op.I, Op.W, Op.R}


def rows_from(*texts):
    return tuple(tuple(map(parse_action, text.split())) for text in texts)


def rows_of(schedule):
    return [" ".join(map(str, row)) for row in schedule.ranks]


def test_gpipe_on_two_ranks_in_full():
    assert rows_of(lower(build("gpipe", ranks=2, microbatches=2))) == [
        "0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0RECV_B0 0B1 0B0 0REDUCE_GRAD",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0 1REDUCE_GRAD",
    ]


def test_a_receive_is_posted_ahead_of_the_recomputation_that_hides_it():
    row = rows_of(lower(build("gpipe", ranks=2, microbatches=2, recompute="always")))[0]
    assert "0RECV_B1 0R1 0B1 0RECV_B0 0R0 0B0" in row


def test_one_stage_on_one_rank_only_reduces():
    lowered = lower(build("gpipe", ranks=1, microbatches=2))
    assert rows_of(lowered) == ["0F0 0F1 0B1 0B0 0REDUCE_GRAD"]
    assert lowered.max_receives == (0,)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_compute_keeps_its_order_and_receives_stay_few(name, recompute):
    for ranks in (1, 2, 3, 6):
        for microbatches in (1, 2, 5, 12):
            bare = build(name, ranks=ranks, microbatches=microbatches, recompute=recompute)
            lowered = lower(bare)
            kept = tuple(tuple(a for a in row if a.op in COMPUTE) for row in lowered.ranks)
            assert kept == bare.ranks
            assert lowered.max_activations == bare.max_activations
            assert max(lowered.max_receives) <= 2


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_evaluation_tables(name):
    for ranks in (1, 2, 4):
        evaluation = forward_only(build(name, ranks=ranks, microbatches=3, recompute="always"))
        assert all(action.op is Op.F for row in evaluation.ranks for action in row)
        check(evaluation)
        lowered = lower(evaluation)
        check(lowered)
        assert lowered.is_lowered
        assert not any(a.op in (Op.REDUCE_GRAD, Op.SEND_B) for r in lowered.ranks for a in r)


def test_a_reduction_stands_behind_the_send_that_others_wait_for():
    bare = from_text("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert rows_of(lower(bare))[1] == "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1REDUCE_GRAD"


def test_neighbouring_stages_on_one_rank_need_no_transfer():
    lowered = lower(from_text("0F0,1F0,1B0,0B0\n"))
    assert rows_of(lowered) == ["0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"]


def test_every_holder_of_a_mirrored_stage_reduces_it_even_without_a_backward():
    placement = Placement(((0, 1), (1, 0)), (0,))
    rows = rows_from("0F0 0B0", "1F0 1B0")
    lowered = lower(Schedule("mirrored", placement, rows))
    check(lowered)
    assert rows_of(lowered) == [
        "0RECV_B0 0F0 0SEND_F0 0B0 1REDUCE_GRAD 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 0REDUCE_GRAD",
    ]


def test_mirrored_stages_are_reduced_in_one_order_on_all_their_ranks():
    """The order is that in which the last holder is done, not the one in which a rank is."""
    lowered = lower(build("gems", ranks=4, microbatches=2))
    reductions = [
        [action.stage for action in row if action.op is Op.REDUCE_GRAD] for row in lowered.ranks
    ]
    assert reductions == [[3, 0], [2, 1], [2, 1], [3, 0]]
    backwards = [[a.stage for a in row if a.op is Op.B] for row in lowered.ranks]
    assert backwards == [[0, 3], [1, 2], [2, 1], [3, 0]]


def test_receives_of_a_channel_are_posted_in_the_order_of_its_sends():
    """Rank 1 runs micro-batch 1 first, but the channel brings micro-batch 0 first."""
    lowered = lower(from_text("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0\n"))
    posts = [str(action) for action in lowered.ranks[1] if action.op is Op.RECV_F]
    assert posts == ["1RECV_F0", "1RECV_F1"]
    check(lowered)


# Stages 0 and 2 on rank 0, so both outputs of the first and gradients of the last go to rank 1.
CROSSING = """0F0,0F1,2F0,2B0,0F2,2F1,2B1,2F2,2B2,0B0,0B1,0B2
1F0,1F1,1F2,1B0,1B1,1B2
"""


def test_receives_from_a_rank_are_posted_in_the_order_of_its_sends_whatever_their_channels():
    """Each channel was in order by itself, so each needed a communicator of its own."""
    lowered = lower(from_text(CROSSING))
    check(lowered)
    assert rows_of(lowered)[1].startswith(
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1RECV_F2 1F1 1SEND_F1 1F2 1SEND_F2 1RECV_B1 1B0"
    )


def test_every_table_posts_what_comes_from_a_rank_in_the_order_of_its_sends(variant):
    name, options = variant
    bare = build(name, ranks=4, microbatches=8, **options)
    for table in (lower(bare), lower(forward_only(bare))):
        check(table)
        at = {action: rank for rank, row in enumerate(table.ranks) for action in row}
        sent, posted = defaultdict(list), defaultdict(list)
        for action, rank in at.items():
            if action.op in SENDS:
                sent[rank, at[counterpart(action)]].append(counterpart(action))
            elif action.op in RECEIVES:
                posted[at[counterpart(action)], rank].append(action)
        assert sent == posted and sent


def test_a_post_moves_ahead_of_the_send_that_would_block_it():
    """Posted one action ahead, each rank's first receive stands behind a send the other awaits."""
    placement = Placement(((0, 1), (1, 0)), (0, 1, 0, 1))
    rows = rows_from("0F0 0F2 1F1 1F3 1B1 1B3 0B0 0B2", "0F1 0F3 1F0 1F2 1B0 1B2 0B1 0B3")
    lowered = lower(Schedule("mirrored", placement, rows))
    check(lowered)
    assert rows_of(lowered)[0].startswith("0F0 0SEND_F0 1RECV_F1 0F2")
    assert rows_of(lowered)[1].startswith("0F1 1RECV_F0 0SEND_F1 0F3")


def test_lowering_twice_or_a_table_that_deadlocks_is_refused():
    with pytest.raises(ScheduleError, match="lowered already"):
        lower(lower(build("gpipe", ranks=2, microbatches=1)))
    with pytest.raises(ScheduleError, match="deadlock"):
        lower(from_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))


def test_each_bucket_of_a_stage_is_reduced_behind_its_last_backward():
    lowered = lower(build("gpipe", ranks=2, microbatches=2), {0: 2, 1: 1})
    assert rows_of(lowered) == [
        "0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0RECV_B0 0B1 0B0 0REDUCE_GRAD0 0REDUCE_GRAD1",
        "1RECV_F0 1RECV_F1 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0 1REDUCE_GRAD0",
    ]
    check(lowered)


def test_the_last_weight_gradients_end_one_stage_after_the_other():
    """So that its buckets leave while those of the other are made; sums keep their order."""
    row = rows_from("0F0 0F1 1F0 1F1 1I0 0I0 1I1 0I1 0W0 1W0 0W1 1W1")
    bare = Schedule("both", Placement(((0, 0),), (0, 0)), row)
    lowered = lower(bare, {0: 1, 1: 1})
    assert rows_of(lowered)[0].endswith("1W0 1W1 1REDUCE_GRAD0 0W0 0W1 0REDUCE_GRAD0")
    check(lowered)
    assert "0W0 1W0 0W1 0REDUCE_GRAD 1W1" in rows_of(lower(bare))[0]
