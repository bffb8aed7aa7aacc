"""When the host waits for a device in a run: once a step, for the one before."""

from collections import defaultdict
from itertools import pairwise

import pytest

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.errors import NonFiniteError
from gpipe_hpc.trainer import loop
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest
from tests.simulated.world import run_simulated
from tests.support import metrics, train_here

WITHIN_FIRST = 3  # steps in which layers are looked at


def train_played(ranks, *overrides):
    config = compose_config(overrides)
    check_config(config, ranks)
    return run_simulated(ranks, lambda world: run_training(config, world, StopRequest()))


@pytest.fixture
def spans(monkeypatch):
    """Return, by rank, how often the host had waited when each step began and ended."""
    found = defaultdict(list)
    train = loop.train_one_step

    def noted(session, look=None, tell=None):
        device = session.pipe.world.device
        before = len(device.host_waits)
        trained = train(session, look, tell)
        found[session.pipe.world.rank].append((before, device.host_waits[before:], device))
        return trained

    monkeypatch.setattr(loop, "train_one_step", noted)
    return found


@pytest.mark.parametrize(
    "own",
    [
        ("pipeline.stages=2", "train.clip_norm=1"),
        ("pipeline.stages=2", "train.clip_norm=1", "optimizer=lamb"),
        ("pipeline.replicas=2", "train.clip_norm=1"),
    ],
    ids=str,
)
def test_the_host_waits_once_a_step_and_never_within_one(own, tiny, tmp_path, spans):
    """The norm, the loss and the marks of a step each let the device run dry."""
    train_played(2, *tiny, *own, "train.steps=7", f"run.dir={tmp_path / 'played'}")
    assert sorted(spans) == [0, 1]
    for steps in spans.values():
        assert len(steps) == 7
        for _, within, _ in steps[WITHIN_FIRST:]:
            assert not within
        begins = [begin for begin, _, _ in steps]
        between = [b - a for a, b in pairwise(begins)]
        device = steps[0][2]
        assert set(between[WITHIN_FIRST:]) == {1}, device.host_waits[begins[WITHIN_FIRST] :]


def test_float16_waits_for_its_overflows_and_for_nothing_else(tiny, tmp_path, spans):
    own = ("pipeline.stages=2", "train.clip_norm=1", "train.precision=float16")
    train_played(2, *tiny, *own, "train.steps=6", f"run.dir={tmp_path}")
    assert [len(spans[rank]) for rank in (0, 1)] == [6, 6]
    for steps in spans.values():
        for _, within, _ in steps[WITHIN_FIRST:]:
            assert len(within) == 1 and "deferred" in str(within[0].where)


def test_lines_are_those_of_a_cpu(tiny, tmp_path):
    own = (*tiny, "pipeline.stages=2", "train.clip_norm=1", "train.steps=5", "checkpoint.every=2")
    train_played(2, *own, f"run.dir={tmp_path / 'played'}")
    train_here(2, *own, f"run.dir={tmp_path / 'cpu'}")
    rows = [
        [
            (line["step"], line["loss"], line["lr"], line["grad_norm"], line["position"])
            for line in metrics(tmp_path / name)
            if "loss" in line
        ]
        for name in ("played", "cpu")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 5


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_kept(tiny, tmp_path):
    """It is looked at one step later; a checkpoint waits until it was."""
    own = ("train.clip_norm=null", "optimizer.lr=1e38", "checkpoint.every=1", "train.steps=9")
    with pytest.raises(NonFiniteError, match=r"step (\d+), rank 0, .* last intact checkpoint is"):
        train_played(1, *tiny, *own, f"run.dir={tmp_path}")
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept and len(lines) < 9
    assert max(int(name.rpartition("_")[2]) for name in kept) <= len(lines)
