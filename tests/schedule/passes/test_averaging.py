"""Tables of replicas that train apart."""

import pytest

from gpipe_hpc.schedule import (
    Op,
    ScheduleError,
    build,
    check,
    lower,
    parse_action,
    simulate,
    to_text,
    with_averages,
    without_reductions,
)
from gpipe_hpc.schedule.costs import Costs

NAMES = ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "chimera", "gems", "dualpipe"]


def lowered(name):
    table = build(name, ranks=4, microbatches=8)
    return lower(table, dict.fromkeys(range(table.num_stages), 3))


def of(table, op):
    return [[action for action in row if action.op is op] for row in table.ranks]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_summed_is_averaged_at_the_end(name):
    whole = lowered(name)
    alone, averaging = without_reductions(whole), with_averages(whole)
    for each in (alone, averaging):
        check(each, is_apart=True)
    assert not any(of(alone, Op.AVERAGE))
    summed = of(whole, Op.REDUCE_GRAD)
    averaged = of(averaging, Op.AVERAGE)
    assert [[(a.stage, a.bucket) for a in row] for row in averaged] == [
        [(a.stage, a.bucket) for a in row] for row in summed
    ]
    for row, rest in zip(averaging.ranks, alone.ranks, strict=True):
        assert row[: len(rest)] == rest, "everything else stays, ahead of the averages"
    shared = {s for s in range(whole.num_stages) if len(whole.placement.holders(s)) > 1}
    assert {a.stage for row in of(alone, Op.REDUCE_GRAD) for a in row} == shared


def test_a_table_without_reductions_is_for_replicas_that_train_apart_alone():
    with pytest.raises(ScheduleError, match=r"REDUCE_GRAD0? is missing"):
        check(without_reductions(lowered("gpipe")))


@pytest.mark.parametrize(("row", "told"), [(0, "0AVERAGE1 is missing"), (3, "3AVERAGE1 is missi")])
def test_an_average_that_is_missing_is_named(row, told):
    table = with_averages(lowered("gpipe"))
    rows = [list(each) for each in table.ranks]
    rows[row].remove(parse_action(f"{row}AVERAGE1"))
    broken = type(table)(table.name, table.placement, tuple(map(tuple, rows)))
    with pytest.raises(ScheduleError, match=told):
        check(broken, is_apart=True)


def test_averages_take_their_time_behind_the_step():
    costs = Costs(forward=1.0, backward=2.0, reduction=9.0)
    whole = lowered("gpipe")
    alone, averaging = without_reductions(whole), with_averages(whole)
    took = simulate(alone, costs).makespan
    assert simulate(averaging, costs).makespan == pytest.approx(took + 9.0)
    assert "0AVERAGE0" in to_text(averaging)
