"""A run whose memory is used up says what was planned: all ranks know, though one has counted."""

import pytest

from gpipe_hpc.engine.stage_runner import StageRunner
from gpipe_hpc.errors import DeviceMemoryError
from gpipe_hpc.optim.adamw import AdamW
from tests.support import train_here


@pytest.mark.parametrize("stage", [0, 1])
def test_the_plan_is_shown_on_the_rank_that_needs_it(tiny, tmp_path, monkeypatch, stage):
    """Rank 0 has counted; what it found was shown to nobody but the reader of its log."""
    backward = StageRunner.backward

    def greedy(self, *args, **keywords):
        if self.stage.index == stage:
            raise MemoryError("Tried to allocate 2 GiB")
        return backward(self, *args, **keywords)

    monkeypatch.setattr(StageRunner, "backward", greedy)
    with pytest.raises(DeviceMemoryError) as told:
        train_here(2, *tiny, "pipeline.stages=2", "train.steps=2", f"run.dir={tmp_path}")
    text = str(told.value)
    assert f"rank {stage}, stage {stage}, micro-batch" in text
    rows = {line.split()[0]: line for line in text.splitlines()[1:]}
    names = ("weights", "gradients", "optimizer", "activations", "sum")
    assert all("B" in rows[name] and " - " not in rows[name][:40] for name in names)
    assert "on the host, for the whole process" in text


def test_the_first_step_of_the_optimizer_takes_its_state(tiny, tmp_path, monkeypatch):
    """No action: two numbers for each parameter are allocated when the first backward is done."""
    own = AdamW.step
    done = []

    def greedy(self, *args, **keywords):
        done.append(self)
        if len(done) == 2:
            raise MemoryError("Tried to allocate 2 GiB")
        return own(self, *args, **keywords)

    monkeypatch.setattr(AdamW, "step", greedy)
    with pytest.raises(DeviceMemoryError) as told:
        train_here(2, *tiny, "pipeline.stages=2", "train.steps=2", f"run.dir={tmp_path}")
    text = str(told.value)
    assert ", the optimizer's step: MemoryError: Tried to allocate 2 GiB" in text
    assert "planned" in text and "out of memory; remedies: " in text.splitlines()[-1]
