"""Communicators of groups are created at startup, not in a forward."""

import pytest
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.threads import ThreadGroup
from tests.simulated.world import run_simulated
from tests.support import batch, square_sum

LAYERS = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.BatchNorm1d, 4), LayerSpec(nn.Linear, 4, 4)]


@pytest.mark.parametrize(
    "settings",
    [
        {"stages": 1, "replicas": 2, "normalise_over_replicas": True},
        {"stages": 2, "replicas": 2, "normalise_over_replicas": True},
        {"stages": 2, "replicas": 2, "outer": {"every": 2}},
        {"stages": 2, "schedule": "chimera"},
    ],
    ids=str,
)
def test_first_all_reduce_of_each_group_is_made_at_startup(settings, monkeypatch):
    """Regression: NCCL creates a communicator in the first call, which was a BatchNorm forward."""
    start = ThreadGroup.start_all_reduce
    called = {}

    def record(group, tensor):
        called.setdefault(id(group), (group, is_started[0]))
        return start(group, tensor)

    monkeypatch.setattr(ThreadGroup, "start_all_reduce", record)
    is_started = [False]
    num_ranks = settings["stages"] * settings.get("replicas", 1)

    def body(world):
        pipe = Pipeline(LAYERS, square_sum, microbatches=4, world=world, **settings)
        world.world_group.all_gather_object(None)
        is_started[0] = True
        own = pipe.share(16)
        inputs, targets = batch(16)
        pipe.step(inputs[own], targets[own])
        pipe.clip_grad_norm_(1.0)

    run_simulated(num_ranks, body)
    assert called
    assert not [group.ranks for group, was_started in called.values() if was_started]
