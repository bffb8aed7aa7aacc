"""A whole run of the command on played devices: checkpoints, resuming, and one wait a step."""

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest
from tests.simulated.world import run_simulated
from tests.support import losses

SETTINGS = ("train.precision=float16", "train.clip_norm=1.0", "checkpoint.every=3")


def body(ranks, *overrides):
    config = compose_config(overrides)
    check_config(config, ranks)
    return lambda world: run_training(config, world, StopRequest())


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, ("train.deterministic=true",), id="deterministic"),
        pytest.param(
            2, ("checkpoint.in_background=true",), id="background", marks=pytest.mark.slow
        ),
        pytest.param(2, ("checkpoint.neighbour_every=2",), id="neighbour", marks=pytest.mark.slow),
        # A tensor whose parts lie on two ranks is put together by exchanges that receive alone.
        pytest.param(4, ("pipeline.replicas=2", "outer.shard=flat"), id="flat shards"),
    ],
)
def test_a_run_that_is_resumed_has_the_losses_of_a_cpu(tiny, tmp_path, ranks, settings):
    given = (*tiny, *SETTINGS, *settings)
    for stop in (3, 6):
        steps = ("train.steps=6", f"train.stop_at={stop}")
        there = body(ranks, *given, *steps, f"run.dir={tmp_path / 'cpu'}")
        assert run_on_threads(ranks, there) == [0] * ranks
        there = body(ranks, *given, *steps, f"run.dir={tmp_path / 'played'}")
        assert run_simulated(ranks, there).results == [0] * ranks
    assert losses(tmp_path / "played") == losses(tmp_path / "cpu")


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, (), id="plain"),
        pytest.param(2, ("train.precision=float16", "optimizer=lamb"), id="float16 and lamb"),
        pytest.param(4, ("pipeline.replicas=2", "outer=local_sgd", "outer.every=1"), id="apart"),
    ],
)
def test_a_step_more_is_a_wait_more(tiny, tmp_path, ranks, settings):
    """Loss, norm, times, and what replicas saw, are read behind a step, in one wait for all."""
    found = []
    for steps in (3, 7):
        run = (f"train.steps={steps}", f"run.dir={tmp_path / str(steps)}", "train.clip_norm=1.0")
        there = run_simulated(ranks, body(ranks, *tiny, *settings, *run))
        found.append([len(device.host_waits) for device in there.devices])
    assert all(more - few <= 4 for few, more in zip(*found, strict=True)), found
