"""Parameters that are gathered: where the table has it, what it refuses, and what time it takes."""

import csv
import io

import pytest
import torch.distributed.pipelining.schedules as theirs

from gpipe_hpc.schedule import (
    Action,
    Costs,
    Op,
    ScheduleError,
    build,
    check,
    forward_only,
    from_text,
    lower,
    schedule_names,
    simulate,
    to_text,
)
from gpipe_hpc.schedule.passes.gathers import add_gathers
from gpipe_hpc.schedule.waits import DataFlow
from gpipe_hpc.visualize.chrome_trace import chrome_trace
from gpipe_hpc.visualize.svg import draw_svg

SCHEDULES = sorted({*schedule_names()} - {"file", "auto"})


def rows_of(schedule):
    return [" ".join(map(str, row)) for row in schedule.ranks]


def test_each_holder_gathers_ahead_of_its_first_forward_of_the_stage():
    lowered = add_gathers(lower(build("gpipe", ranks=2, microbatches=2)), {0: 2, 1: 1})
    first, second = rows_of(lowered)
    assert "0UNSHARD1 0UNSHARD0 0F0" in first and first.count("UNSHARD") == 2
    assert "1UNSHARD0 1F0" in second and second.count("UNSHARD") == 1
    check(lowered)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_with_gathers_is_proved_read_and_simulated(name):
    bare = build(name, ranks=4, microbatches=8)
    buckets = dict.fromkeys(range(bare.num_stages), 3)
    for table in (lower(bare, buckets), lower(forward_only(bare))):
        gathered = add_gathers(table, buckets)
        check(gathered)
        again = from_text(to_text(gathered))
        assert again.ranks == gathered.ranks
        check(again)
        text = csv.reader(io.StringIO(to_text(gathered)))
        for row, own in zip(text, gathered.ranks, strict=True):
            assert [str(theirs._Action.from_str(cell)) for cell in row] == list(map(str, own))
        simulate(gathered, Costs(forward=1, input_gradient=1, weight_gradient=1, gather=1))


def test_a_table_that_has_its_own_stays():
    own = from_text("0UNSHARD,0F0,0B0,0REDUCE_GRAD\n")
    check(own)
    assert add_gathers(own, {0: 3}) is own


def test_a_holder_without_a_forward_gathers_at_its_end():
    lowered = lower(build("chimera", ranks=2, microbatches=1))
    rows = rows_of(add_gathers(lowered, {0: 1, 1: 1}))
    assert all("0UNSHARD0" in row and "1UNSHARD0" in row for row in rows)
    check(add_gathers(lowered, {0: 1, 1: 1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0UNSHARD0,0B0,0REDUCE_GRAD\n", r"0F0: waits for 0UNSHARD0, which comes later"),
        ("0UNSHARD0,0UNSHARD0,0F0,0B0,0REDUCE_GRAD\n", r"0UNSHARD0 occurs twice"),
        ("0UNSHARD1,0F0,0B0,0REDUCE_GRAD\n", r"0UNSHARD0 is missing"),
        ("0UNSHARD,0UNSHARD0,0F0,0B0,0REDUCE_GRAD\n", r"0UNSHARD already covers all buckets"),
        ("1UNSHARD0,0F0,0B0,0REDUCE_GRAD\n", r"stage must be 0 to 0, got 1"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(ScheduleError, match=message):
        check(from_text(text))


def test_holders_of_a_mirrored_stage_all_gather_it():
    gathered = add_gathers(lower(build("gems", ranks=2, microbatches=2)), {0: 1, 1: 1})
    text = to_text(gathered).splitlines()
    text[1] = text[1].replace("0UNSHARD0,", "")
    with pytest.raises(ScheduleError, match=r"rank 1: 0UNSHARD0 is missing"):
        check(from_text("\n".join(text) + "\n"))


def test_gathering_begins_with_the_step_and_the_first_forward_waits_for_it():
    """Stage 1 waits for its input anyway, so that its gathering costs nothing."""
    lowered = add_gathers(lower(build("gpipe", ranks=2, microbatches=1)), {0: 2, 1: 1})
    timeline = simulate(lowered, Costs(forward=4, backward=8, gather=[3, 5]))
    found = {str(e.action): (e.start_s, e.end_s) for row in timeline.events for e in row}
    assert found["0UNSHARD1"] == (0, 1.5) and found["0UNSHARD0"] == (1.5, 3)
    assert found["0F0"] == (3, 7) and found["1UNSHARD0"] == (0, 5) and found["1F0"] == (7, 11)
    event = next(e for e in timeline.events[0] if e.action == Action(Op.F, 0, 0))
    wait = DataFlow(timeline).waited_for(event)
    assert str(wait.maker.action) == "0UNSHARD0" and wait.thing == "gathered parameters"
    free = simulate(lowered, Costs(forward=4, backward=8, gather=[3, 5]).without_transfers())
    assert free.makespan == timeline.makespan - 3


def test_gathering_is_drawn_beside_the_compute():
    lowered = add_gathers(lower(build("gpipe", ranks=2, microbatches=2)), {0: 2, 1: 1})
    timeline = simulate(lowered, Costs(forward=4, backward=8, gather=3))
    assert "parameters gathered" in draw_svg(timeline)
    assert "0UNSHARD1" in chrome_trace([timeline])
