"""Random numbers for (seed, step, micro-batch, layer) never change: compared with stored losses."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from tests.support import mean_square

# If one of these changes, all seeded runs of users with random layers give other results.
LOSSES = {
    "torch": [3.028873125832, 2.560758863769, 3.608028319117],
    "python": [2.85223261548, 2.663005582448, 3.116484784809],
    "numpy": [2.349119269912, 3.157163767242, 2.601965868921],
}


class Noise(nn.Module):
    """Layer that draws from one of the global generators of the process."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, inputs):
        draw = {"torch": lambda: torch.rand(()).item(), "python": random.random}
        return inputs + draw.get(self.kind, np.random.random)()


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", LOSSES)
def test_seeded_training_reproduces_stored_losses(kind, ranks, recompute):
    def body(world):
        weights = (torch.arange(16.0, dtype=torch.float64) / 20).reshape(4, 4)
        linear = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        linear.weight.data.copy_(weights)
        layers = [linear, LayerSpec(nn.Dropout, 0.3), LayerSpec(Noise, kind)]
        settings = {"microbatches": 3, "seed": 5, "recompute": recompute, "world": world}
        pipe = Pipeline(layers, mean_square, **settings)
        batch = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)
        return [pipe.step(batch, batch.flip(0)).loss for _ in range(3)]

    for losses in run_on_threads(ranks, body):
        assert losses == pytest.approx(LOSSES[kind], rel=1e-10)
