"""float16 and BatchNorm on the command line: what is logged, kept and refused."""

import pytest

from tests.support import metrics

MODEL = """
import math
from torch import nn
from gpipe_hpc.models import LayerSpec

class Spiked(nn.Linear):
    '''Gives one gradient that is not finite, in the second step.'''

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.num_seen = 0
        self.weight.register_hook(self.spike)

    def spike(self, gradient):
        self.num_seen += 1
        return gradient * (math.inf if self.num_seen == 3 else 1.0)

def build(spiked=False, norm=False):
    last = LayerSpec(Spiked if spiked else nn.Linear, 8, 10)
    return [LayerSpec(nn.Linear, 64, 8), *([LayerSpec(nn.BatchNorm1d, 8)] if norm else []), last]
"""
SETTINGS = (
    "model._target_=mine.build",
    "data=synthetic_vectors",
    "data.num_samples=32",
    "train.batch_size=8",
    "train.validate_every=0",
    "train.validate_batches=1",
    "pipeline.microbatches=2",
    "pipeline.partition=parameters",
    "pipeline.recompute=never",
)


@pytest.fixture(autouse=True)
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)


@pytest.mark.slow
def test_an_overflow_is_logged_and_kept(train, tmp_path):
    spiked = ("model.spiked=true", "train.precision=float16", "run.dir=run")
    output = train(2, *SETTINGS, *spiked, "train.steps=3")
    said = "gradients overflowed float16 at a loss scale of 65536; the scale is now 32768"
    assert output.count(said) == 1
    steps = metrics(tmp_path / "run")[:3]
    assert [(s["loss_scale"], s["skipped_steps"]) for s in steps] == [
        (65536.0, 0),
        (65536.0, 1),
        (32768.0, 1),
    ]
    assert [s["grad_norm"] > 0 for s in steps] == [True, False, True]
    assert steps[2]["position"] == 24
    again = ("train.steps=4", "model.spiked=false", "checkpoint.resume=run")
    train(2, *SETTINGS, *spiked, *again)
    *_, last = (line for line in metrics(tmp_path / "run") if "loss" in line)
    assert (last["step"], last["loss_scale"], last["skipped_steps"]) == (4, 32768.0, 1)


@pytest.mark.slow
def test_a_too_small_microbatch_is_refused_before_the_first_step(start_ranks, tmp_path):
    # 30 samples: the last batch of the epoch has 6, so micro-batches of 1.
    small = ("data.num_samples=30", "train.steps=4", "pipeline.microbatches=4", "run.dir=run")
    ranks = start_ranks(1, *SETTINGS, "model.norm=true", *small).wait(60)
    assert ranks.codes != [0]
    said = ranks.outputs[0]
    assert "layers.1 (BatchNorm1d): expected at least 2 values per channel" in said
    assert "(the smallest batch of the run has 6 samples)" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
