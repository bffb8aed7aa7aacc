"""Training with replicas that run unequal numbers of micro-batches."""

import json

import pytest

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.draw.pictures import simulated
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.plan import make_plan
from gpipe_hpc.trainer.traces.files import read_replicas
from tests.support import losses, train_here

UNEQUAL = ("pipeline.replicas=2", "outer.weights=[3,1]", "pipeline.microbatches=4")
REFUSED = {
    "[3,1,1]": r"a weight for each of 2 replica\(s\), got 3",
    "[3,0]": r"outer\.weights, expected at least 1, got \[3, 0\]",
    "[3,-1]": r"outer\.weights, expected at least 1, got \[3, -1\]",
    "[]": r"a weight for each of 2 replica\(s\), got 0",
    "[4,1]": r"2 x 4 = 8; use 5 micro-batches",
}


@pytest.fixture
def settings(tiny, tmp_path):
    def compose(name, *more):
        own = ("train.precision=float32", "train.clip_norm=1", "train.batch_size=21")
        return (*tiny, *own, f"run.dir={tmp_path / name}", *more)

    return compose


def test_it_learns_what_one_replica_learns_and_goes_on_with_other_weights(settings, tmp_path):
    steps = ("train.steps=6", "checkpoint.every=1")
    train_here(4, *settings("one", *UNEQUAL, *steps, "pipeline.stages=2", "train.stop_at=3"))
    changed = ("pipeline.replicas=2", "outer.weights=[1,3]", "pipeline.microbatches=2")
    train_here(2, *settings("one", *changed, *steps, "train.accumulation=2"))
    train_here(1, *settings("whole", "pipeline.microbatches=8", *steps))
    ours, whole = losses(tmp_path / "one"), losses(tmp_path / "whole")
    assert len(ours) == 6 and ours == pytest.approx(whole, rel=1e-5)


def test_the_report_and_the_traces_know_what_each_replica_ran(settings, tmp_path):
    train_here(2, *settings("run", *UNEQUAL, "train.steps=3"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["layout"]["microbatches_of_replicas"] == [6, 2]
    timelines = read_replicas(tmp_path / "run" / summary["traced_step"]["file"])
    assert [timeline.num_microbatches for timeline in timelines] == [6, 2]
    ran = [{e.action.microbatch for row in t.events for e in row} - {None} for t in timelines]
    assert ran == [set(range(6)), set(range(2))]


def test_plan_and_draw_show_the_replica_with_the_most():
    """It sets the pace, and the memory that a rank needs."""
    own = ("model=mlp", "data=synthetic_vectors", "pipeline.stages=2", *UNEQUAL)
    text = make_plan(compose_config(own)).text
    assert "one is shown, the one with most micro-batches (the replicas have 6, 2)" in text
    assert "6 micro-batches on 2 ranks" in text
    (timeline,) = simulated(compose_config(own)).timelines
    assert timeline.num_microbatches == 6


@pytest.mark.parametrize("weights", REFUSED)
def test_bad_weights_are_refused_before_anything_runs(weights):
    config = compose_config([*UNEQUAL, f"outer.weights={weights}"])
    with pytest.raises(ConfigError, match=REFUSED[weights]):
        check_config(config, 2)


def test_batchnorm_over_replicas_needs_equal_ones():
    config = compose_config([*UNEQUAL, "pipeline.normalise_over_replicas=true"])
    with pytest.raises(ConfigError, match=r"normalise_over_replicas.*outer\.weights"):
        check_config(config, 2)
