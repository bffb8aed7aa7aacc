"""A step that is done late counts only where no rank has failed meanwhile."""

from types import SimpleNamespace

import pytest

from gpipe_hpc.comm.failing.report import Report
from gpipe_hpc.errors import PeerError
from gpipe_hpc.training.figures.results import Line, Results


class _World:
    """A world on an accelerator, of which another rank may have failed."""

    rank = 1
    device = SimpleNamespace(is_accelerator=True)
    activity = None

    def __init__(self, has_news):
        self.has_news = has_news

    def explain(self, symptom):
        return Report(f"{symptom}: rank 0 has failed")


def _line(step):
    trained = SimpleNamespace(
        step=step,
        laps=SimpleNamespace(stepped=0.0),
        result=SimpleNamespace(loss=1.0),
        grad_norm=1.0,
    )
    return Line(trained, timed=f"timed {step}", step_time_s=1.0, times=None, known={})


def _results(world):
    session = SimpleNamespace(pipe=SimpleNamespace(world=world))
    return Results(session, ledger=None, metrics=None, progress=None, is_late=True)


def test_a_step_whose_sums_a_failed_rank_may_have_cut_off_does_not_count():
    world = _World(has_news=False)
    results = _results(world)
    assert results.add(_line(1)) is None
    world.has_news = True  # while the device was at step 1
    with pytest.raises(PeerError, match="step 1: another rank has failed: rank 0 has failed"):
        results.settle()


def test_a_step_counts_once_the_next_one_is_on_its_way():
    results = _results(_World(has_news=False))
    assert results.add(_line(1)) is None
    assert results.add(_line(2)) == "timed 1"
    assert results.settle() == "timed 2"
    assert results.settle() is None
