import csv
import io

import pytest
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

from gpipe_hpc.schedule import Placement, ScheduleError, build, check, from_text, lower, to_text


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 9), (4, 1), (1, 2)])
def test_what_is_written_is_read_back(variant, recompute, ranks, microbatches):
    name, options = variant
    if ranks % max(2 if name == "dualpipe" else 1, options.get("pipelines", name == "chimera") * 2):
        return
    if microbatches < options.get("replications", 0) * 2:
        return
    if ranks < options.get("stages", 1):
        return
    bare = build(name, ranks=ranks, microbatches=microbatches, recompute=recompute, **options)
    if not bare.ranks[-1]:
        return  # one micro-batch in two rows: see below
    for schedule in (bare, lower(bare)):
        read = from_text(to_text(schedule), name="mine")
        assert (read.name, read.ranks) == ("mine", schedule.ranks)
        assert sorted(read.overlaps) == sorted(schedule.overlaps)
        # Micro-batches go where they went; who holds a stage idly shows in reductions.
        for microbatch in range(microbatches):
            for stage in range(bare.num_stages):
                found = read.placement.rank_of(stage, microbatch)
                assert found == schedule.placement.rank_of(stage, microbatch)
        for stage in range(bare.num_stages if schedule.is_lowered else 0):
            assert read.placement.holders(stage) == schedule.placement.holders(stage)
        check(read)


def test_a_last_rank_without_work_shows_in_its_reduction():
    """Of the bare table nothing says which stage it holds."""
    bare = build("rerouted", ranks=4, microbatches=1, stages=3)
    assert not bare.ranks[-1] and len(from_text(to_text(bare)).ranks) == 3
    lowered = lower(bare)
    read = from_text(to_text(lowered))
    assert read.ranks == lowered.ranks and str(read.ranks[-1][0]) == "0REDUCE_GRAD"
    assert read.placement.holders(0) == lowered.placement.holders(0)


def test_mirrored_placements_are_inferred():
    read = from_text("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n")
    assert read.placement == Placement(((0, 1), (1, 0)), (0, 1))
    check(read)


def test_bubbles_blank_ends_and_spaces_are_no_part_of_the_table():
    read = from_text("0F0, ,0B0\r\n,1F0,1B0,\r\n\r\n")
    assert to_text(read) == "0F0,0B0\n1F0,1B0\n"


def test_blocks_share_a_cell_as_torch_writes_them():
    bare = build("dualpipe_v", ranks=1, microbatches=3, recompute="always")
    assert "(0F2;1R1;1B1)OVERLAP_F_B" in to_text(bare)
    assert from_text(to_text(bare)).overlaps == bare.overlaps
    lowered = lower(build("dualpipe_v", ranks=2, microbatches=4))
    assert "OVERLAP" not in to_text(lowered)  # there the sends say it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,xyz\n", r"line 2, cell 2: .*'xyz'"),
        (
            "0F0,0B0,1B0\n1F0\n",
            r"line 2, cell 1: 1F0 is on a different rank than 1B0 \(line 1, cell 3\)",
        ),
        ("0F0,0F1\n1F0\n", r"1F1 is missing"),
        ("\n,,\n", r"no action"),
        ("0REDUCE_GRAD\n", r"no compute"),
        ("0F0,(0F1;0B0\n", r"line 1, cell 2: .*expected a block such as"),
        ("(0B0;0F1)OVERLAP_F_B\n", r"line 1, cell 1: .*expected a block"),
    ],
)
def test_errors_name_line_and_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_text(text)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_torch_loads_and_accepts_the_table(name):
    text = to_text(build(name, ranks=3, microbatches=5))
    rows = csv.reader(io.StringIO(text))
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    assert _validate_schedule(actions, 3, 3, 5) == {0: 0, 1: 1, 2: 2}
