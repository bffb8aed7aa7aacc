"""train.deterministic, from the first thing that a run computes on."""

import pytest
import torch

from gpipe_hpc.trainer import loop
from tests.support import train_here


@pytest.mark.parametrize("asked", [True, False])
def test_a_search_ahead_of_the_run_is_deterministic_already(tiny, tmp_path, monkeypatch, asked):
    """cuBLAS takes its workspace with the first product; later it is refused, in the first step."""
    found = []

    def with_layout(config, world, run, words):
        found.append(torch.are_deterministic_algorithms_enabled())

    monkeypatch.setattr(loop, "with_layout", with_layout)
    train_here(1, *tiny, f"train.deterministic={asked}", "train.steps=1", f"run.dir={tmp_path}")
    assert found == [asked]
    assert not torch.are_deterministic_algorithms_enabled()
