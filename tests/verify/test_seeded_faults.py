"""Faults put back into the engine one by one: the comparison finds each, and says where."""

import torch

from gpipe_hpc.engine import steps
from gpipe_hpc.engine.keyed import Keyed
from gpipe_hpc.engine.work import StageWork
from gpipe_hpc.verify.comparing import Verdict


def differing(report):
    return [what for what, each in report.lines.items() if each.verdict is Verdict.DIFFERENT]


def test_another_mask_in_recomputation(compared, monkeypatch):
    """R draws under another key than F: the first recomputed dropout layer is named."""
    recompute = StageWork.recompute
    monkeypatch.setattr(
        StageWork,
        "recompute",
        lambda self, m, key: recompute(self, m, lambda layer: key(layer) + 1),
    )
    report = compared("model.kind=dropped", "pipeline.recompute=always")
    assert "gradients" in differing(report) and "loss" not in differing(report)
    assert "step 1, micro-batch 0, layers.1 (Dropped): its output when it was recompu" in str(
        report
    )


def test_keys_that_depend_on_the_stage(compared, monkeypatch):
    seed = Keyed._seed
    monkeypatch.setattr(Keyed, "_seed", lambda self, key: seed(self, key ^ 1))
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
    backward = StageWork.backward

    def forgetful(self, microbatch, gradients):
        if microbatch == 2 and self.stage.index == 0:
            gradients = [None if g is None else torch.zeros_like(g) for g in gradients]
        return backward(self, microbatch, gradients)

    monkeypatch.setattr(StageWork, "backward", forgetful)
    report = compared("model.kind=plain")
    assert differing(report)[0] == "gradients"
    assert "micro-batch 2, layers.2 (Plain): the gradient of its output differs first" in str(
        report
    )
