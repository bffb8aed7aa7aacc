"""A batch that grows: sizes, every sample once an epoch, and runs that go on to the bit."""

import json
import re
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.data import ShuffledSampler
from gpipe_hpc.errors import CheckpointError, ConfigError
from gpipe_hpc.optim.large_batch.ramp import batch_size_at, smallest_batch
from gpipe_hpc.optim.lr import lr_at
from gpipe_hpc.settings import Config, OptimizerConfig, TrainConfig
from gpipe_hpc.settings.training import BatchRampConfig, LrConfig
from tests.support import metrics, train_here


def ramped(start=4, steps=8, increment=1, batch_size=20, **more) -> TrainConfig:
    return TrainConfig(
        batch_size=batch_size, batch_ramp=BatchRampConfig(start, steps, increment), **more
    )


def sizes(train: TrainConfig, number: int) -> list[int]:
    return [batch_size_at(step, train) for step in range(number)]


def test_grows_linearly_to_the_full_size():
    assert sizes(ramped(), 10) == [4, 6, 8, 10, 12, 14, 16, 18, 20, 20]
    assert sizes(ramped(steps=3), 5) == [4, 9, 14, 20, 20]


def test_grows_in_stairs():
    assert sizes(ramped(increment=8), 10) == [4, 4, 4, 4, 12, 12, 12, 12, 20, 20]
    assert sizes(ramped(increment=100), 9) == [4] * 8 + [20]


def test_without_a_start_it_is_full_at_once():
    assert sizes(ramped(start=None), 3) == [20, 20, 20]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(1, 9),
)
def test_every_sample_once_an_epoch_whatever_the_ramp(samples, start, more, steps, increment):
    train = ramped(start, steps, increment, start + more)
    sampler = ShuffledSampler(samples, train.batch_size, 3, partial(batch_size_at, train=train))
    seen, found = [], []
    for batch in sampler.batches(0):
        seen += [batch.epoch * samples + index for index in batch.indices]
        found.append(len(batch.indices))
        if batch.position == 3 * samples:
            break
    assert sorted(seen) == list(range(3 * samples))
    for number in range(1, len(found) + 1):
        assert smallest_batch(samples, number, train) == min(found[:number])
    # From any step on the same batches follow.
    step = len(found) // 2
    rest = [b for b, _ in zip(sampler.batches(sum(found[:step]), step), found[step:], strict=False)]
    assert [len(each.indices) for each in rest] == found[step:]


def test_the_rate_follows_the_batch_of_the_step():
    """Goyal et al.: lr x batch / base; with start_ratio=1 it rises from that of the base batch."""
    config = Config(
        optimizer=OptimizerConfig(lr=0.5),
        lr=LrConfig(0, decay="constant", base_batch_size=4),
        train=ramped(steps=4),
    )
    assert [lr_at(step, config) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.5, 2.5]


TINY = (
    "model=mlp",
    "data=synthetic_vectors",
    "data.num_samples=50",
    "pipeline.microbatches=2",
    "pipeline.partition=uniform",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "train.batch_size=20",
    "train.batch_ramp.start=4",
    "train.batch_ramp.steps=8",
    "train.steps=12",
    "train.validate_every=0",
    "lr.base_batch_size=4",
    "checkpoint.every=1",
    "checkpoint.keep=20",
)


def test_a_run_goes_on_to_the_bit_in_the_midst_of_its_ramp(tmp_path, same_end):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_here(1, *TINY, f"run.dir={whole}")
    lines = [line for line in metrics(whole) if "loss" in line]
    # 4 + 6 + 8 + 10 + 12 = 40 of 50: the sixth has the 10 that are left of the epoch.
    assert [line["batch_size"] for line in lines[:9]] == [4, 6, 8, 10, 12, 10, 16, 18, 16]
    assert [line["position"] for line in lines[:6]] == [4, 10, 18, 28, 40, 50]
    for stop in (3, 5, 9):
        train_here(1, *TINY, f"run.dir={cut}", f"train.stop_at={stop}")
    train_here(1, *TINY, f"run.dir={cut}")
    same_end(whole, cut)


def test_another_layout_goes_on_with_the_same_samples(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_here(1, *TINY, f"run.dir={whole}")
    train_here(1, *TINY, f"run.dir={cut}", "train.stop_at=3")
    train_here(2, *TINY, f"run.dir={cut}", "pipeline.replicas=2", "pipeline.microbatches=1")
    one, other = ([line for line in metrics(run) if "loss" in line] for run in (whole, cut))
    assert [line["batch_size"] for line in one] == [line["batch_size"] for line in other]
    for left, right in zip(one, other, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-4)
        assert left["lr"] == right["lr"]


def test_another_ramp_is_other_data(tmp_path):
    run = tmp_path / "run"
    train_here(1, *TINY, f"run.dir={run}", "train.stop_at=3")
    manifest = json.loads((run / "checkpoints/step_00000003/gpipe_hpc.json").read_text())
    assert manifest["extra"]["data"]["train.batch_ramp"] == [4, 8, 1]
    words = re.escape("train.batch_ramp: was [4, 8, 1], is [4, 9, 1]")
    with pytest.raises(CheckpointError, match=words):
        train_here(
            1,
            *TINY,
            f"run.dir={tmp_path / 'other'}",
            f"checkpoint.resume={run}",
            "train.batch_ramp.steps=9",
        )
    with pytest.raises(ConfigError, match=r"train.batch_ramp.start: was 4, is 5"):
        train_here(1, *TINY, f"run.dir={run}", "train.batch_ramp.start=5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.batch_ramp.start=21"],
            "train.batch_ramp.start, expected at most train.batch_size",
        ),
        (["train.batch_ramp.start=0"], "train.batch_ramp.start, expected at least 1"),
        (["train.batch_ramp.steps=0"], "train.batch_ramp.steps, expected the number of steps"),
        (["train.batch_ramp.increment=0"], "train.batch_ramp.increment, expected at least 1"),
    ],
)
def test_settings_are_checked(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(compose_config([*TINY, *overrides]), 1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.batch_ramp.start=1", "train.batch_ramp.start=1 is less than replicas"),
        ("train.batch_ramp.steps=13", "the batch never grows to train.batch_size"),
    ],
)
def test_doubtful_settings_warn(override, words):
    (warning,) = check_config(compose_config([*TINY, "lr.warmup_steps=0", override]), 1)
    assert words in warning
