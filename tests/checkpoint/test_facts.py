"""What a checkpoint says of itself, when that is not what was written."""

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline
from gpipe_hpc.checkpoint.manifest import MANIFEST
from gpipe_hpc.errors import CheckpointError


def pipeline():
    return Pipeline([nn.Linear(2, 2)], lambda o, t: (o - t).square().mean())


@pytest.mark.parametrize("text", ["[]", "null", '{"format": 1}', '{"steps_done": 1}'])
def test_facts_that_lack_something_are_named(tmp_path, text):
    pipe = pipeline()
    pipe.save(tmp_path / "kept")
    (tmp_path / "kept" / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"not a checkpoint written by gpipe_hpc: no "):
        pipe.load(tmp_path / "kept")


def test_the_root_is_no_checkpoint():
    with pytest.raises(CheckpointError, match="not a checkpoint written by gpipe_hpc"):
        pipeline().load("/")


def test_optimizer_state_that_no_file_can_hold_is_told_and_leaves_nothing(tmp_path):
    pipe = pipeline()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for parameter in pipe.parameters():
        optimizer.state[parameter] = {"mine": object()}
    with pytest.raises(
        CheckpointError,
        match=r"object at the optimizer.s state\[.optimizer.layers.0.weight.mine.\]",
    ):
        pipe.save(tmp_path / "new", optimizer)
    assert not list(tmp_path.iterdir())
