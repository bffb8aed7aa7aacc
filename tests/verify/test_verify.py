"""The command that holds a layout against one plain process: what is the same is said to be."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.trainer.start import open_session
from gpipe_hpc.verify.comparing import Verdict
from gpipe_hpc.verify.run import verify

GPT = [
    "data=synthetic",
    "data.seq_len=8",
    "data.vocab_size=32",
    "model.vocab_size=32",
    "model.block_size=8",
    "model.num_layers=2",
    "model.width=16",
    "model.num_heads=2",
    "model.dropout=0.2",
    "train.batch_size=10",
    "pipeline.microbatches=4",
    "pipeline.partition=uniform",
    "verify.steps=2",
]

LAYOUTS = {
    "gpipe": [],
    "replicas": ["pipeline.replicas=2", "pipeline.microbatches=2"],
    "replicas of unequal speed": ["pipeline.replicas=2", "outer.weights=[1,3]"],
    "accumulation": ["train.accumulation=2", "pipeline.microbatches=2"],
    "zero bubble, V-shaped": ["pipeline.schedule=zb_v"],
    "mirrored": ["pipeline.schedule=chimera", "pipeline.recompute=always"],
    "more micro-batches than samples": ["train.batch_size=3"],
    "bfloat16": ["train.precision=bfloat16"],
    "float16": ["train.precision=float16"],
    "offloaded": ["pipeline.offload=true", "pipeline.schedule=gpipe"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_the_same_to_the_bit(layout):
    report = verify(compose_config([*GPT, *LAYOUTS[layout]]))
    assert report.is_same, str(report)
    assert {each.verdict for each in report.lines.values()} == {Verdict.EXACT}, str(report)
    assert report.lines["gradients"].count > 0
    assert report.lines["restored checkpoint"].count > 0


@pytest.mark.parametrize("layout", [[], ["outer.shard=flat", "pipeline.replicas=2"]])
def test_a_checkpoint_is_compared_if_layers_are_placed_differently(monkeypatch, layout):
    """A partition by measured times may differ when the same settings are used again."""
    sessions = Counter()

    def opened(config, world, *others):
        sessions[world.rank] += 1
        partition = {1: [2, 5], 2: [4, 3]}[sessions[world.rank]]
        pipeline = replace(config.pipeline, partition=partition)
        return open_session(replace(config, pipeline=pipeline), world, *others)

    monkeypatch.setattr("gpipe_hpc.verify.run.open_session", opened)
    report = verify(compose_config([*GPT, "optimizer=adamw", *layout]))
    line = report.lines["restored checkpoint"]
    assert line.verdict is Verdict.EXACT and line.count > 0, str(report)
    assert set(sessions.values()) == {2}


SMALL = ["train.batch_size=8", "pipeline.microbatches=2", "pipeline.partition=uniform"]


def test_long_skips_are_the_same():
    unet = ["model=unet_tiny", "data=synthetic_masks", "pipeline.stages=3", "verify.steps=1"]
    report = verify(compose_config([*SMALL, *unet]))
    assert {each.verdict for each in report.lines.values()} == {Verdict.EXACT}, str(report)


def test_statistics_of_batchnorm_are_the_same_but_for_rounding():
    """The plain ones are computed in float64: those of the layout round otherwise."""
    images = ["data=synthetic_images", "data.height=16", "data.width=16", "data.num_classes=10"]
    report = verify(
        compose_config(
            [*SMALL, *images, "model=resnet_small", "pipeline.replicas=2", "verify.steps=1"]
        )
    )
    assert report.is_same, str(report)
    assert report.lines["buffers"].count > 0
    assert report.lines["gradients"].verdict is Verdict.EXACT


def test_tied_weights_are_the_same_but_for_the_order_of_their_sum():
    small = [word for word in GPT if not word.startswith("model.")]
    tied = ["model=gpt2", "model.vocab_size=32", "model.block_size=8", "model.num_layers=2"]
    report = verify(compose_config([*small, *tied, "model.width=16", "model.num_heads=2"]))
    assert report.is_same, str(report)


def test_what_cannot_be_compared_is_refused():
    together = ["pipeline.replicas=2", "pipeline.normalise_over_replicas=true"]
    with pytest.raises(ConfigError, match="normalise_over_replicas"):
        verify(compose_config([*GPT, *together]))
    with pytest.raises(ConfigError, match="at least one step"):
        verify(compose_config([*GPT, "train.steps=0"]))


def test_a_model_too_large_to_compare_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr("gpipe_hpc.verify.run.free_bytes", lambda: 10_000)
    with pytest.raises(ConfigError, match="make the model smaller"):
        verify(compose_config(GPT))


@pytest.mark.slow
def test_ranks_may_be_processes(start_ranks):
    """Rank 0 alone reports."""
    layout = ["pipeline.stages=1", "pipeline.replicas=2", "pipeline.microbatches=2"]
    ranks = start_ranks(2, *GPT, *layout, module="gpipe_hpc.verify").wait(90)
    assert ranks.codes == [0, 0], "\n".join(ranks.outputs)
    assert f"{'gradients':<27}  bitwise equal" in ranks.outputs[0]
    assert ranks.outputs[0].rstrip().endswith("the same training")
    assert "same training" not in ranks.outputs[1]


@pytest.mark.slow
def test_a_difference_ends_with_3(start):
    """A counter among a layer's attributes is counted again in recomputation."""
    users = ["model=mlp", "model._target_=users_layers.build", "model.kind=counting"]
    data = ["data=synthetic_vectors", "data.width=16", "data.num_classes=4", "model.width=16"]
    always = ["pipeline.recompute=always", "train.batch_size=24", "pipeline.partition=uniform"]
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    done = start(*users, *data, *always, env=path, module="gpipe_hpc.verify").wait(60)
    assert done.code == 3, done.output
    assert "NOT the same training: step 1, micro-batch 0, layers.1 (Counting)" in done.output


def test_the_ranks_are_on_the_device_that_is_asked_for(monkeypatch):
    """They were always on the CPU where no launcher had started them."""
    asked = []

    def device_of_rank(name, rank):
        asked.append((name, rank))
        return HostDevice()

    monkeypatch.setattr("gpipe_hpc.verify.run.device_of_rank", device_of_rank)
    verify(compose_config([*GPT, "train.device=cpu"]))
    assert sorted(asked) == [("cpu", 0), ("cpu", 1)]
