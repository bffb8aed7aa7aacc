"""Broadcasts of parameters and buffers when a pipeline is built."""

import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.threads import ThreadGroup
from tests.support import mean_square

WIDTH = 4


def record_broadcasts(monkeypatch):
    """Record the ranks and the position of each broadcast that a group starts."""
    started = []
    own = ThreadGroup.start_broadcast

    def start(group, tensor, root):
        started.append((group.ranks, group.position))
        return own(group, tensor, root)

    monkeypatch.setattr(ThreadGroup, "start_broadcast", start)
    return started


def layers(value):
    made = []
    for _ in range(10):
        made += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
    for layer in made:
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.data.fill_(value)
    return made


def test_startup_makes_one_broadcast_per_rank(monkeypatch):
    """Regression: each of the forty parameters took a broadcast, and the buffers another."""
    started = record_broadcasts(monkeypatch)

    def body(world):
        pipe = Pipeline(
            layers(float(world.rank + 1)),
            mean_square,
            stages=2,
            replicas=2,
            schedule="interleaved",
            world=world,
        )
        return list(pipe.parameters()), pipe.stage_rank

    for parameters, rank in run_on_threads(4, body):
        assert len(parameters) >= 16
        # The values of replica 0, whose ranks are 0 and 1.
        assert all(bool((p == rank + 1.0).all()) for p in parameters)
    # One broadcast per rank, although each rank has two stages.
    assert sorted(started) == [((0, 2), 0), ((0, 2), 1), ((1, 3), 0), ((1, 3), 1)]


def test_tied_parameters_of_the_same_ranks_share_a_broadcast(monkeypatch):
    started = record_broadcasts(monkeypatch)

    def body(world):
        linear = LayerSpec(nn.Linear, WIDTH, WIDTH)
        ties = {"weight": "matrix", "bias": "offset"}
        layers = [linear.tied(ties), linear, linear.tied(ties)]
        pipe = Pipeline(layers, mean_square, stages=2, world=world)
        tied = pipe.stages[0 if world.rank == 0 else 1].tied
        return {name: value.detach().clone() for name, value in tied.items()}

    first, last = run_on_threads(2, body)
    assert first.keys() == last.keys() and len(first) == 2
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert sorted(started) == [((0, 1), 0), ((0, 1), 1)]
