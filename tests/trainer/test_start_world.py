"""What a process does with its memory before it runs layers, in a run or to time them."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gpipe_hpc.config import compose_config
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.plan import make_plan
from gpipe_hpc.trainer import start_world
from gpipe_hpc.trainer.measuring import rank_emulation
from gpipe_hpc.trainer.search.from_settings import cost_model_of_layers


@pytest.mark.parametrize(("words", "times"), [((), 1), (("train.keep_freed_memory=false",), 0)])
def test_layers_are_timed_with_memory_kept_as_in_a_run(tiny, monkeypatch, words, times):
    calls: list[None] = []
    monkeypatch.setattr(start_world, "keep_freed_memory", lambda: calls.append(None))
    monkeypatch.setattr(rank_emulation, "load_generators", lambda *_: nullcontext())
    config = compose_config([*tiny, *words, "pipeline.stages=2", "plan.costs=measured"])
    make_plan(config)
    assert len(calls) == times
    cost_model_of_layers(config, HostDevice(), 1)
    assert len(calls) == 2 * times


def test_memory_that_is_not_kept_goes_back(tiny, monkeypatch):
    calls: list[None] = []
    monkeypatch.setattr(start_world, "return_freed_memory", lambda: calls.append(None))
    start_world.keep_memory(compose_config(tiny))
    assert not calls
    start_world.keep_memory(compose_config([*tiny, "train.keep_freed_memory=false"]))
    assert calls


def test_training_begins_with_a_peak_of_its_own():
    """The peak of a start that times layers counted as that of training."""
    device = HostDevice()
    block = torch.ones(64 * 2**20)
    before = device.memory_peak()
    del block
    start_world.settle_memory(device)
    assert device.memory_peak() < before - 2**27 or not Path("/proc/self/clear_refs").exists()


def test_a_plan_that_counts_leaves_the_memory_as_it_is(tiny, monkeypatch):
    calls: list[None] = []
    monkeypatch.setattr(start_world, "keep_freed_memory", lambda: calls.append(None))
    plan = make_plan(compose_config([*tiny, "pipeline.stages=2"]))
    assert plan.model.parameters > 0
    assert not calls, "nothing is run"
