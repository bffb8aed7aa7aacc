"""Faults put back into the engine one by one: the comparison finds each, and says where."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from gpipe_hpc.checkpoint import contents
from gpipe_hpc.engine import outputs, steps
from gpipe_hpc.engine import run as engine_run
from gpipe_hpc.engine.buffer_sync import BufferSynchronizer
from gpipe_hpc.engine.buffers import LayerBuffers
from gpipe_hpc.engine.outputs import RequiresGradTracker
from gpipe_hpc.engine.random_state import RandomState
from gpipe_hpc.engine.stage_runner import StageRunner
from gpipe_hpc.errors import ActionError
from gpipe_hpc.models import batchnorm
from gpipe_hpc.verify.comparing import Verdict


def differing(report):
    return [what for what, each in report.lines.items() if each.verdict is Verdict.DIFFERENT]


KINDS = ["averaged", "spectral", "inner_norm", "drawing", "masking", "scratch", "remembering"]


@pytest.mark.parametrize(
    "kind, schedule", zip(KINDS, cycle(["gpipe", "one_f_one_b"]), strict=False)
)
def test_without_a_fault_there_is_no_difference(compared, kind, schedule):
    report = compared(
        f"model.kind={kind}", "pipeline.recompute=always", f"pipeline.schedule={schedule}"
    )
    assert report.is_same, str(report)


def test_buffers_that_recomputation_finds_changed(compared, monkeypatch):
    monkeypatch.setattr(LayerBuffers, "again", lambda self, before: nullcontext())
    report = compared("model.kind=averaged", "pipeline.recompute=always")
    assert "gradients" in differing(report)
    assert "micro-batch 0, layers.1 (Averaged): its output when it was recomputed" in str(report)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_statistics_that_a_layers_own_checkpoint_updates_again(compared, monkeypatch, recompute):
    monkeypatch.setattr(batchnorm, "_is_rerun", lambda: False)
    monkeypatch.setattr(batchnorm.PipelineStep, "begin", lambda self: None)
    report = compared("model.kind=inner_norm", f"pipeline.recompute={recompute}")
    assert differing(report) == ["buffers"]
    assert "layers.1.inner.1.running_mean" in report.first


@pytest.mark.parametrize("policy", ["average", "first", "each"])
def test_buffers_of_replicas_are_as_the_setting_says(compared, policy):
    layout = ["pipeline.replicas=2", "train.batch_size=25", f"pipeline.buffers={policy}"]
    report = compared("model.kind=averaged", *layout)
    assert report.is_same and report.lines["buffers"].count, str(report)


def test_buffers_that_drift_apart(compared, monkeypatch):
    monkeypatch.setattr(BufferSynchronizer, "settle", lambda self, united: None)
    report = compared("model.kind=averaged", "pipeline.replicas=2")
    assert differing(report) == ["buffers"]
    assert "layers.1.mean" in report.first


def test_an_output_that_a_layer_writes_into_again(compared, monkeypatch):
    """Fault and remedy are not in one place: what is kept for R is looked at, too."""
    monkeypatch.setattr(outputs, "_copied", lambda nest, held: nest)
    try:
        report = compared("model.kind=scratch", "pipeline.recompute=always")
    except ActionError as error:
        assert "layers.3" in str(error) or "stage 1" in str(error)
    else:
        assert "gradients" in differing(report)


def draws_in_between(monkeypatch):
    """Let each third layer find torch's generator drawn from, as by a thread that reads data."""
    seed, calls = RandomState.seed, [0]

    def disturbed(self, key, draws, **how):
        block = seed(self, key, draws, **how)
        calls[0] += 1
        if calls[0] % 3 == 0:
            torch.rand(1)
        return block

    monkeypatch.setattr(RandomState, "seed", disturbed)


def test_draws_of_another_thread_stop_the_run_by_name(compared, monkeypatch):
    draws_in_between(monkeypatch)
    with pytest.raises(ActionError, match=r"layers\.\d \(Dropped\).*another thread"):
        compared("model.kind=dropped", "pipeline.recompute=always")


def test_draws_of_another_thread_that_nobody_looks_for(compared, monkeypatch):
    draws_in_between(monkeypatch)
    monkeypatch.setattr(RandomState, "_drawn", lambda self, draws: (None, None, None))
    report = compared("model.kind=dropped", "pipeline.recompute=always")
    assert "gradients" in differing(report)


def test_boundaries_that_are_marked_as_trained(compared, monkeypatch):
    flags = RequiresGradTracker.flags
    monkeypatch.setattr(
        RequiresGradTracker,
        "flags",
        lambda self, *given, **how: [True for _ in flags(self, *given, **how)],
    )
    monkeypatch.setattr(
        RequiresGradTracker,
        "keep",
        lambda self, runner, promised, left: [t if t.requires_grad else None for t in left],
    )
    report = compared("model.kind=masking", "pipeline.recompute=always")
    assert "loss" in differing(report)


def test_extra_state_that_a_checkpoint_keeps_wrong(compared, monkeypatch):
    encode = contents.encode
    monkeypatch.setattr(contents, "encode", lambda name, state: encode(name, {"seen": 0}))
    report = compared("model.kind=remembering")
    assert differing(report) == ["restored checkpoint"]
    assert "extra state of layers.1" in report.first


def test_another_mask_in_recomputation(compared, monkeypatch):
    """R draws under another key than F: the first recomputed dropout layer is named."""
    monkeypatch.setattr(RandomState, "_drawn", lambda self, draws: (None, None, None))
    recompute = StageRunner.recompute

    def recompute_otherwise(self, run, microbatch):
        other = replace(run, keys=lambda m: lambda layer: run.keys(m)(layer) + 1)
        return recompute(self, other, microbatch)

    monkeypatch.setattr(StageRunner, "recompute", recompute_otherwise)
    report = compared("model.kind=dropped", "pipeline.recompute=always")
    assert "gradients" in differing(report) and "loss" not in differing(report)
    assert "step 1, micro-batch 0, layers.1 (Dropped): its output when it was recompu" in str(
        report
    )


def test_keys_that_depend_on_the_stage(compared, monkeypatch):
    keys = engine_run.microbatch_keys

    def other_keys(*given):
        return [{layer: key ^ 1 for layer, key in each.items()} for each in keys(*given)]

    monkeypatch.setattr(engine_run, "microbatch_keys", other_keys)
    report = compared("model.kind=dropped")
    assert "loss" in differing(report)
    assert "micro-batch 0, layers.1 (Dropped): its output differs first" in str(report)


def test_gradients_divided_twice(compared, monkeypatch):
    divisor = steps.final_divisor
    monkeypatch.setattr(steps, "final_divisor", lambda w, s: divisor(w, s) * 2)
    report = compared("model.kind=plain")
    assert differing(report)[0] == "gradients"
    assert "no layer's output" in report.first


def test_a_micro_batch_whose_gradient_is_lost(compared, monkeypatch):
    """As when a message is taken for another's: only the third micro-batch is wrong."""
    backward = StageRunner.backward

    def forgetful(self, microbatch, gradients):
        if microbatch == 2 and self.stage.index == 0:
            gradients = [None if g is None else torch.zeros_like(g) for g in gradients]
        return backward(self, microbatch, gradients)

    monkeypatch.setattr(StageRunner, "backward", forgetful)
    report = compared("model.kind=plain")
    assert differing(report)[0] == "gradients"
    assert "micro-batch 2, layers.2 (Plain): the gradient of its output differs first" in str(
        report
    )
