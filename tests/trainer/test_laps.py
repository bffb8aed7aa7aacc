"""Where the time of a step went, by the marks between its parts."""

import pytest

from gpipe_hpc.trainer.one_step import StepTimestamps


def laps(began, read, piped):
    return StepTimestamps(began, read, piped, piped, piped + 1, piped + 3, piped + 4)


def test_what_comes_behind_the_pipeline_is_its_edge():
    spent = laps(0.0, 2.0, 10.0).spent(pipeline_s=7.0)
    assert (spent.reading_s, spent.reading_ahead_s, spent.edge_s) == (2.0, 2.0, 1.0)
    assert (spent.clipping_s, spent.optimizer_s) == (1.0, 2.0)


@pytest.mark.parametrize(("pipeline_s", "ahead_s"), [(9.0, 1.0), (10.0, 0.0), (12.0, 0.0)])
def test_reading_while_other_ranks_have_begun_is_part_of_the_pipeline(pipeline_s, ahead_s):
    """It was counted twice, and the host had less than no time."""
    spent = laps(0.0, 2.0, 10.0).spent(pipeline_s)
    assert (spent.reading_s, spent.reading_ahead_s, spent.edge_s) == (2.0, ahead_s, 0.0)
