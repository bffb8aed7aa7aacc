"""Rates and medians of a start: the first step, which prepares, counts in none."""

import pytest

from gpipe_hpc.trainer.one_step import StepPartTimes
from gpipe_hpc.trainer.summary.ledger import RunStatistics, StepTimings


def note(ledger, step_time_s, pipeline_s, bubble=0.1, loss=1.0):
    spent = StepPartTimes(0.0, 0.0, 0.25 * step_time_s, 0.0, 1.0)
    ledger.note(StepTimings(pipeline_s, bubble, spent), step_time_s, 6, loss)


def test_the_first_step_counts_in_no_rate_unless_it_is_the_only_one():
    ledger = RunStatistics(first_step=7)
    assert ledger.samples_per_s is None and ledger.medians()["step_time_s"] is None
    note(ledger, 60.0, 50.0, loss=3.0)
    assert ledger.samples_per_s == 0.1
    for step_time_s, pipeline_s in ((2.0, 1.5), (3.0, 2.0), (4.0, 3.9)):
        note(ledger, step_time_s, pipeline_s, loss=2.0)
    assert ledger.samples_per_s == pytest.approx(18 / 9)
    medians = ledger.medians()
    assert (medians["step_time_s"], medians["pipeline_s"]) == (3.0, 2.0)
    assert medians["outside_pipeline_s"] == 0.5
    assert (medians["edge_s"], medians["optimizer_s"]) == (0.75, 1.0)
    assert (ledger.num_steps, ledger.first_loss, ledger.last_loss) == (4, 3.0, 2.0)


def test_a_step_whose_times_are_not_known_yet_counts_in_no_median():
    """A GPU's times come with the step behind."""
    ledger = RunStatistics(first_step=0)
    for _ in range(2):
        ledger.note(None, 2.0, 6, 1.0)
    assert ledger.samples_per_s == 3.0 and ledger.medians()["pipeline_s"] is None


def test_stalls_add_up_by_name():
    ledger = RunStatistics(first_step=0)
    for name, seconds in (("checkpoint_stall_s", 1.0), ("neighbour_stall_s", 4.0)) * 2:
        ledger.stall(name, seconds)
    assert ledger.stalls_s == {"checkpoint_stall_s": 2.0, "neighbour_stall_s": 8.0}
