"""What is said of data that can be trained on, but not as the user may expect."""

import pytest

from tests.support import train_here

ITEMS = """
import torch
from torch import nn

def pair():
    return [(torch.full((3,), float(i)), torch.zeros(2)) for i in range(8)], []

def layers():
    return [nn.Linear(3, 4), nn.Linear(4, 2)]

def loss(output, target):
    return (output - target).square().sum(), target.numel()
"""


@pytest.mark.parametrize("fraction", [0.05, 0])
def test_an_empty_validation_set_is_reported_unless_intended(
    tiny, tmp_path, monkeypatch, caplog, fraction
):
    """The run ended without a validation loss and without a reason."""
    (tmp_path / "hinted_items.py").write_text(ITEMS)
    monkeypatch.syspath_prepend(tmp_path)
    own = (
        "model=own",
        "model._target_=hinted_items.layers",
        "data=own",
        "loss._target_=hinted_items.loss",
    )
    own += ("data._target_=hinted_items.pair", f"data.validation_fraction={fraction}")
    words = [each for each in tiny if not each.startswith(("data", "model"))]
    train_here(1, *words, *own, "train.steps=1", f"run.dir={tmp_path / 'run'}")
    assert ("there are no validation samples" in caplog.text) == bool(fraction)
