"""Random numbers that are not torch's in a forward: in factories of layers, and in backwards."""

import random

import numpy as np
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.models import init_key, source_key

WIDTH, SEED = 4, 5


class FromAllSources(nn.Module):
    """Draws its weights as ported initialisers do: by torch, by NumPy and by Python."""

    def __init__(self):
        super().__init__()
        self.by_torch = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.by_numpy = nn.Parameter(torch.tensor(np.random.randn(WIDTH, WIDTH)))
        self.by_python = nn.Parameter(
            torch.tensor([random.random() for _ in range(WIDTH)]).double()
        )

    def forward(self, x):
        return torch.tanh(x @ self.by_torch @ self.by_numpy + self.by_python)


def built_weights(num_ranks, **layout):
    def body(world):
        pipe = Pipeline(
            [LayerSpec(FromAllSources) for _ in range(4)],
            nn.functional.mse_loss,
            world=world,
            seed=SEED,
            partition="uniform",
            microbatches=2,
            **layout,
        )
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    return {name: p for own in run_on_threads(num_ranks, body) for name, p in own.items()}


def expected_weights(index):
    key = init_key(SEED, index)
    torch.manual_seed(key)
    words = source_key(key, 1)
    np.random.seed([words & 0xFFFFFFFF, words >> 32])
    random.seed(source_key(key, 0))
    return dict(FromAllSources().named_parameters())


def test_weights_drawn_by_numpy_and_python_hang_on_seed_and_index_alone():
    # They were other ones in every run, and in every layout.
    want = {
        f"layers.{index}.{name}": parameter
        for index in range(4)
        for name, parameter in expected_weights(index).items()
    }
    for num_ranks, layout in ((1, {"stages": 1}), (2, {"stages": 2}), (2, {"replicas": 2})):
        random.seed(num_ranks)  # whatever the user did before
        np.random.seed(num_ranks)
        got = built_weights(num_ranks, **layout)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_building_layers_leaves_the_users_generators_alone():
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    built_weights(1, stages=1)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
