"""A whole run of the command on played devices: checkpoints, resuming, and one wait a step."""

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.training.loop import run_training
from gpipe_hpc.training.signals import StopRequest
from tests.played.world import run_played
from tests.support import losses

SETTINGS = ("train.precision=float16", "train.clip_norm=1.0", "checkpoint.every=3")


def body(*overrides):
    config = compose_config(overrides)
    check_config(config, 2)
    return lambda world: run_training(config, world, StopRequest())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="plain"),
        pytest.param(("checkpoint.in_background=true",), id="background", marks=pytest.mark.slow),
        pytest.param(("checkpoint.neighbour_every=2",), id="neighbour", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_resumed_has_the_losses_of_a_cpu(tiny, tmp_path, settings):
    given = (*tiny, *SETTINGS, *settings)
    for stop in (3, 6):
        steps = ("train.steps=6", f"train.stop_at={stop}")
        assert run_on_threads(2, body(*given, *steps, f"run.dir={tmp_path / 'cpu'}")) == [0, 0]
        there = run_played(2, body(*given, *steps, f"run.dir={tmp_path / 'played'}"))
        assert there.results == [0, 0]
    assert losses(tmp_path / "played") == losses(tmp_path / "cpu")


def test_a_step_more_is_a_wait_more(tiny, tmp_path):
    """Loss, norm and times are read behind a step, in one wait for all."""
    found = []
    for steps in (3, 7):
        run = (f"train.steps={steps}", f"run.dir={tmp_path / str(steps)}", "train.clip_norm=1.0")
        there = run_played(2, body(*tiny, *run))
        found.append(len(there.devices[0].host_waits))
    assert found[1] - found[0] <= 4, found
