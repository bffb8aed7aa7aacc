"""A step that is done late: it counts where no rank has failed, for as long as the device took."""

from types import SimpleNamespace

import pytest

from gpipe_hpc.comm.watchdog.report import FailureReport
from gpipe_hpc.errors import PeerError
from gpipe_hpc.trainer.figures.results import Results, StepLine


class _World:
    """A world on an accelerator, of which another rank may have failed."""

    rank = 1
    device = SimpleNamespace(is_accelerator=True)
    activity = None

    def __init__(self, has_peer_failure):
        self.has_peer_failure = has_peer_failure

    def explain(self, symptom):
        return FailureReport(f"{symptom}: rank 0 has failed")


def _line(step):
    trained = SimpleNamespace(
        step=step,
        laps=SimpleNamespace(left=0.0),
        result=SimpleNamespace(loss=1.0),
        grad_norm=1.0,
    )
    return StepLine(trained, timed=f"timed {step}", since=None, times=None, known={})


def _results(world):
    session = SimpleNamespace(pipe=SimpleNamespace(world=world))
    return Results(session, None, None, None, is_late=True, rates=lambda samples, seconds: {})


def test_a_step_whose_sums_a_failed_rank_may_have_cut_off_does_not_count():
    world = _World(has_peer_failure=False)
    results = _results(world)
    assert results.add(_line(1)) is None
    world.has_peer_failure = True  # while the device was at step 1
    with pytest.raises(PeerError, match="step 1: another rank has failed: rank 0 has failed"):
        results.settle()


def test_a_step_counts_once_the_next_one_is_on_its_way():
    results = _results(_World(has_peer_failure=False))
    assert results.add(_line(1)) is None
    assert results.add(_line(2)) == "timed 1"
    assert results.settle() == "timed 2"
    assert results.settle() is None


class _Mark:
    """A mark that the device comes to at some moment."""

    def __init__(self, at_s):
        self.at_s = at_s

    def query(self):
        return True

    def elapsed_ms(self, later):
        return 1e3 * (later.at_s - self.at_s)


@pytest.mark.parametrize("of", [_Mark, float])
def test_a_step_takes_what_its_device_took_from_the_step_before(of):
    """The host had handed a step out in a fifth of its time, and rates were five times too high."""
    written = {}
    told = SimpleNamespace(
        write=lambda step, scalars: written.update({step: scalars}),
        update=lambda step, scalars: None,
        note=lambda times, step_time_s, num_samples, loss: None,
    )
    pipe = SimpleNamespace(world=_World(has_peer_failure=False))
    results = Results(
        *(SimpleNamespace(pipe=pipe), told, told, told),
        **{"is_late": of is _Mark, "rates": lambda samples, seconds: {"rate": samples / seconds}},
    )
    since = None
    for step, (began_s, left_s) in enumerate([(1.0, 2.0), (2.25, 4.0), (9.0, 9.5)], 1):
        trained = SimpleNamespace(
            step=step,
            batch=SimpleNamespace(num_samples=4),
            laps=SimpleNamespace(began=of(began_s), left=of(left_s)),
            result=SimpleNamespace(loss=1.0, scalars=dict),
            grad_norm=1.0,
            lr=1.0,
        )
        results.add(StepLine(trained, "timed", since, None, {}))
        since = None if step == 2 else trained.laps.left  # the second one is saved
    results.settle()
    assert [written[step]["step_time_s"] for step in (1, 2, 3)] == [1.0, 2.0, 0.5]
    assert [written[step]["rate"] for step in (1, 2, 3)] == [4.0, 2.0, 8.0]
