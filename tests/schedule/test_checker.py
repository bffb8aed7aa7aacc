from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from gpipe_hpc.schedule import (
    Placement,
    Schedule,
    ScheduleError,
    build,
    check,
    from_text,
    lower,
    parse_action,
    to_text,
)
from tests.support import refusal

BARE = build("gpipe", ranks=2, microbatches=2)
LOWERED = lower(BARE)  # its rows stand in test_lowering.py
# Two channels lead from rank 0 to rank 1, which uses what they bring in another order.
ACROSS = lower(
    from_text("0F0,0F1,2F0,2B0,0F2,2F1,2B1,2F2,2B2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n")
)
IN_BUCKETS = lower(BARE, {0: 3, 1: 1})


def edited(schedule, rank, old, new):
    """Replace a run of actions in one row; both are given as text."""
    text = " ".join(map(str, schedule.ranks[rank]))
    assert text.count(old) == 1
    row = tuple(map(parse_action, text.replace(old, new).split()))
    rows = tuple(row if at == rank else kept for at, kept in enumerate(schedule.ranks))
    return replace(schedule, ranks=rows)


@pytest.mark.parametrize(
    ("schedule", "rank", "old", "new", "message"),
    [
        (
            BARE,
            0,
            "0F0",
            "0F0 0F0",
            r"rank 0, position 1, 0F0: 0F0 occurs twice, first at rank 0, position 0",
        ),
        (BARE, 0, "0B1", "0I1 0B1", r"rank 0, position 3, 0B1: 0I1 occurs twice"),
        (BARE, 0, "0B1", "0B1 0W1", r"0W1: 0W1 occurs twice"),
        (BARE, 0, "0B0", "", r"rank 0: 0I0 or 0B0 is missing"),
        (BARE, 0, "0B0", "0I0", r"rank 0: 0W0 or 0B0 is missing"),
        (BARE, 1, "1F0", "", r"rank 1, position 2, 1B0: waits for 1F0, which is missing"),
        (
            BARE,
            1,
            "1F0",
            "0F0",
            r"rank 1, position 0, 0F0: wrong rank, the stage is on rank 0",
        ),
        (BARE, 1, "1F0", "2F0", r"2F0: stage must be 0 to 1, got 2"),
        (BARE, 1, "1F0", "1F7", r"1F7: micro-batch must be 0 to 1, got 7"),
        (BARE, 0, "0F0", "0OFFLOAD0 0F0 0FETCH0", r"position 0, 0OFFLOAD0: waits for 0F0"),
        (BARE, 0, "0F0", "0F0 0OFFLOAD0", r"0OFFLOAD0: is never fetched; add 0FETCH0"),
        (BARE, 0, "0F0", "0F0 0FETCH0", r"0FETCH0: waits for 0OFFLOAD0, which is missing"),
        (BARE, 0, "0F0", "0F0 0FETCH0 0OFFLOAD0", r"position 1, 0FETCH0: waits for 0OFFLOAD0"),
        (BARE, 1, "1F1 1B1", "1B1 1F1", r"position 1, 1B1: waits for 1F1, .* at position 2"),
        (BARE, 0, "0B1", "0B1 0R1", r"0B1: waits for 0R1.*position 3"),
        (LOWERED, 0, "0SEND_F0 ", "", r"1RECV_F0: waits for 0SEND_F0, which is missing"),
        (LOWERED, 1, "1RECV_F0 ", "", r"1F0: waits for 1RECV_F0, which is missing"),
        (LOWERED, 0, "0F0 0SEND_F0", "0SEND_F0 0F0", r"0SEND_F0: waits for 0F0"),
        (LOWERED, 1, "1RECV_F1 1F0 1F1", "1F0 1F1 1RECV_F1", r"1F1: waits for 1RECV_F1"),
        (
            LOWERED,
            1,
            "1RECV_F0 1RECV_F1",
            "1RECV_F1 1RECV_F0",
            r"rank 1, position 0, 1RECV_F1: is out of order: rank 0 first sends the message of "
            r"1RECV_F0 \(rank 0, position 1, 0SEND_F0\)",
        ),
        (
            ACROSS,
            1,
            "1RECV_B0 1RECV_F2",
            "1RECV_F2 1RECV_B0",
            r"1RECV_F2: is out of order: rank 0 first sends the message of 1RECV_B0 "
            r"\(rank 0, position \d+, 2SEND_B0\); post receives in the",
        ),
        (LOWERED, 0, " 0REDUCE_GRAD", "", r"rank 0: 0REDUCE_GRAD is missing"),
        (LOWERED, 0, "0B0 0REDUCE_GRAD", "0REDUCE_GRAD 0B0", r"0REDUCE_GRAD: waits for 0B0"),
        (LOWERED, 0, "0REDUCE_GRAD", "0REDUCE_GRAD 0REDUCE_GRAD", r"0REDUCE_GRAD occurs twice"),
        (LOWERED, 0, "0REDUCE_GRAD", "0REDUCE_GRAD 1REDUCE_GRAD", r"1REDUCE_GRAD: wrong rank"),
        (IN_BUCKETS, 0, "0REDUCE_GRAD1 ", "", r"rank 0: 0REDUCE_GRAD1 is missing"),
        (IN_BUCKETS, 0, "D1 0REDUCE_GRAD2", "D1 0REDUCE_GRAD1", r"0REDUCE_GRAD1 occurs twice"),
        (
            IN_BUCKETS,
            0,
            "D1 0REDUCE_GRAD2",
            "D1 0REDUCE_GRAD",
            r"is for one bucket, but 0REDUCE_GRAD already covers all",
        ),
        (IN_BUCKETS, 0, "0B0 0REDUCE_GRAD0", "0REDUCE_GRAD0 0B0", r"0REDUCE_GRAD0: waits for 0B0"),
    ],
)
def test_refusals_name_rank_position_action_and_reason(schedule, rank, old, new, message):
    check(schedule)
    with pytest.raises(ScheduleError, match=message):
        check(edited(schedule, rank, old, new))


def test_a_transfer_within_a_rank_or_behind_the_last_stage_is_refused():
    with pytest.raises(ScheduleError, match="0SEND_F0: transfers a value within one rank"):
        check(from_text("0F0,0SEND_F0,1RECV_F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD\n"))
    with pytest.raises(ScheduleError, match="1SEND_F0: has no partner; add 2RECV_F0"):
        check(edited(LOWERED, 1, "1F0", "1F0 1SEND_F0"))


def test_a_deadlock_names_every_stuck_rank_and_what_it_waits_for():
    schedule = from_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    text = str(error.value)
    assert "rank 0, position 1, 0B0 waits for 1B0 (rank 1, position 3, 1B0, not reached)" in text
    assert "rank 1, position 0, 1F1 waits for 0F1 (rank 0, position 2, 0F1, not reached)" in text


def test_sends_that_block_until_their_receive_is_posted_are_part_of_the_proof():
    """1F1B with receives posted at need runs with buffered sends and hangs with blocking ones."""
    late = from_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    )
    with pytest.raises(ScheduleError) as error:
        check(late)
    assert "0SEND_F1 waits for 1RECV_F1" in str(error.value)
    assert "1SEND_B0 waits for 0RECV_B0" in str(error.value)


def test_reductions_that_wait_for_one_another_are_refused():
    """Each rank would start the reduction that is second on the other and wait there for ever."""
    mirrored = lower(build("gems", ranks=2, microbatches=2))
    check(mirrored)
    crossed = edited(mirrored, 0, "1REDUCE_GRAD 0REDUCE_GRAD", "0REDUCE_GRAD 1REDUCE_GRAD")
    with pytest.raises(ScheduleError) as error:
        check(crossed)
    assert (
        "rank 0, position 8, 0REDUCE_GRAD: deadlock: waits for the same reduction on rank 1"
        in str(error.value)
    )
    assert "runs 1REDUCE_GRAD first" in str(error.value)


def test_declared_bounds_are_kept():
    with pytest.raises(ScheduleError, match=r"rank 1, position 1, 1F1: 2 live .* at most 1"):
        check(replace(BARE, max_activations=(2, 1)))
    with pytest.raises(ScheduleError, match=r"rank 1, position 1, .*2 posted receives.* at most 1"):
        check(replace(LOWERED, max_receives=(2, 1)))
    with pytest.raises(ScheduleError, match="one value for each of 2 ranks, got 1"):
        check(replace(BARE, max_activations=(2,)))


def test_tables_that_only_evaluate_are_legal_but_reduce_and_recompute_nothing():
    check(from_text("0F0,0F1\n1F0,1F1\n"))
    with pytest.raises(ScheduleError, match="0R0: recomputes for a backward that is not"):
        check(from_text("0F0,0R0\n1F0\n"))
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD"):
        check(from_text("0F0,0REDUCE_GRAD\n"))


def test_ranks_and_placement_must_agree():
    placement = Placement(((0, 1),), (0,))
    with pytest.raises(ScheduleError, match="has 1 rows, but its placement has 2 ranks"):
        check(Schedule("short", placement, ((parse_action("0F0"),),)))


def test_mirrored_stages_have_the_same_buckets_on_all_holders_in_one_order():
    """Else one would wait for a bucket that the other starts behind another, or never."""
    mirrored = lower(build("gems", ranks=2, microbatches=2), {0: 2, 1: 2})
    check(mirrored)
    crossed = edited(mirrored, 0, "1REDUCE_GRAD0 1REDUCE_GRAD1", "1REDUCE_GRAD1 1REDUCE_GRAD0")
    with pytest.raises(
        ScheduleError, match=r"1REDUCE_GRAD[01]: deadlock: waits for the same reduction on rank 1"
    ):
        check(crossed)
    with pytest.raises(ScheduleError, match="rank 0: 1REDUCE_GRAD1 is missing"):
        check(edited(mirrored, 0, "1REDUCE_GRAD0 1REDUCE_GRAD1", "1REDUCE_GRAD0"))


def torch_table(schedule_class, num_stages, num_microbatches):
    """Return torch's own table; its function needs no more of the schedule than two numbers."""
    schedule = object.__new__(schedule_class)
    schedule._num_stages, schedule._n_microbatches = num_stages, num_microbatches
    order = schedule._get_pipeline_order()
    return "".join(",".join(str(a or "") for a in order[rank]) + "\n" for rank in sorted(order))


def test_torchs_gpipe_table_loads_and_lowers():
    theirs = from_text(torch_table(ScheduleGPipe, 3, 4))
    assert refusal(check, theirs) is None
    assert refusal(check, lower(theirs)) is None


def test_torchs_1f1b_table_is_refused_as_its_last_rank_never_runs_its_first_forward():
    text = torch_table(Schedule1F1B, 3, 4)
    assert "2F0," not in text
    with pytest.raises(ScheduleError):
        check(from_text(text))
    ours = to_text(build("one_f_one_b", ranks=3, microbatches=4))
    with pytest.raises(ScheduleError, match="2B0: waits for 2F0"):
        check(from_text(ours.replace("2F0,", "")))


def test_a_block_whose_backward_comes_first_is_refused():
    bare = build("dualpipe_v", ranks=2, microbatches=4)
    forward, backward = bare.overlaps[0]
    swap = {forward: backward, backward: forward}
    rows = tuple(tuple(swap.get(action, action) for action in row) for row in bare.ranks)
    with pytest.raises(
        ScheduleError, match=f"{forward}: overlaps {backward}, which must come later"
    ):
        check(replace(bare, ranks=rows))


def test_an_output_kept_for_a_backward_that_waits_for_it_is_refused():
    read = from_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n")
    check(replace(read, overlaps=()))
    with pytest.raises(ScheduleError, match=r"deadlock.*\n.*0B0 waits for 1B0.*\n.*1F1 waits"):
        check(read)
    with pytest.raises(ScheduleError, match="deadlock"):
        lower(read)
