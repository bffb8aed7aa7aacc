"""From what a user asked for to the tables that are run."""

import pytest

from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.planner.tables import make_tables, requested_table
from gpipe_hpc.schedule import Op, Schedule, build, lower


def tables(schedule, recompute="always", **options):
    table = requested_table(schedule, ranks=2, microbatches=3, options=options)
    return make_tables(table, recompute)


def num_recomputed(schedule):
    return sum(action.op is Op.R for row in schedule.ranks for action in row)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_names_become_lowered_tables(name):
    made = tables(name)
    assert made.training.is_lowered and made.evaluation.is_lowered
    assert num_recomputed(made.training) == 6
    ops = {action.op for row in made.evaluation.ranks for action in row}
    assert ops == {Op.F, Op.SEND_F, Op.RECV_F}


def test_recomputation_is_added_to_a_bare_table_that_has_none():
    assert num_recomputed(tables(build("gpipe", ranks=2, microbatches=3)).training) == 6


def test_a_table_with_recomputation_or_lowered_is_taken_as_it_is():
    for given in (
        build("gpipe", ranks=2, microbatches=3, recompute="except_last"),
        lower(build("gpipe", ranks=2, microbatches=3)),
    ):
        assert num_recomputed(tables(given).training) == num_recomputed(given)


def test_a_table_of_another_size_is_refused():
    for given in (build("gpipe", ranks=3, microbatches=3), build("gpipe", ranks=2, microbatches=2)):
        with pytest.raises(ConfigError, match="2 ranks and 3 micro-batches"):
            tables(given)


def test_a_wrong_table_is_refused_before_anything_runs():
    good = build("gpipe", ranks=2, microbatches=3)
    rows = (good.ranks[0], good.ranks[1][:-1])
    with pytest.raises(ScheduleError):
        tables(Schedule("lossy", good.placement, rows))
