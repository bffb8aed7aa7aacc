"""Replicas of a small model, and a plain training loop to compare them with."""

import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from tests.support import batches, square_sum

WIDTH, MICROBATCHES = 4, 4


class Block(nn.Module):
    """Residual block of two linear layers and dropout. `scale` is used only if `scales`."""

    def __init__(self, width, scales):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.scales, self.drop = scales, nn.Dropout(0.2)

    def forward(self, x):
        out = self.drop(self.second(torch.tanh(self.first(x))))
        return x + (out * self.scale if self.scales else out)


def make_block(width, scales):
    return Block(width, scales).double()


def blocks(plain, number=4):
    return [plain.Recipe(make_block, (WIDTH, i % 2 == 0)) for i in range(number)]


def specs_of(layers):
    return [LayerSpec(factory, *args) for factory, args in layers]


def make(layers, world, stages, **options):
    """Return this rank's pipeline of the given layer recipes."""
    return Pipeline(
        specs_of(layers),
        square_sum,
        stages=stages,
        replicas=world.size // stages,
        microbatches=MICROBATCHES,
        seed=5,
        world=world,
        partition="uniform",
        **options,
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_process(plain, layers, rows, *, optimizer=sgd, max_norm=0.5, **cut):
    """Train three batches of `rows` samples in a plain loop; `cut` describes the replicas."""
    return plain.train(
        layers,
        square_sum,
        batches(3, rows, WIDTH),
        seed=5,
        optimizer=optimizer,
        max_norm=max_norm,
        **cut,
    )
