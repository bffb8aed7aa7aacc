"""Transfers between stages keep lazy views and all dtypes, with both transports."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.schedule import Channel
from tests.support import batches, square_sum

WIDTH = 4
both_transports = pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])


class Lazy(nn.Module):
    """Return a conjugate view, a negative view and zeros, whose gradients are lazy views too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, x):
        z = self.linear(torch.complex(x, x + 1)).conj()
        return {"z": z, "minus": z.imag, "nothing": torch._efficientzerotensor((2, 3))}


class Real(nn.Module):
    def forward(self, nest):
        z = nest["z"].conj()
        return z.real * 2 + z.imag + nest["minus"] + nest["nothing"].sum()


@both_transports
def test_lazy_views_are_transferred_between_processes(plain, processes, shares_memory, tmp_path):
    """Regression: isend refused conjugate views, and the negative bit of a view was lost."""
    linear = nn.Linear, (WIDTH, WIDTH, True, None, torch.float64)
    recipes = [plain.Recipe(Lazy, ()), plain.Recipe(Real, ()), plain.Recipe(*linear)]
    data = batches(2)
    expected = plain.train(recipes, square_sum, data, seed=5, microbatches=2, order=reversed_range)

    def body(rank):
        pipe = Pipeline(
            [LayerSpec(factory, *args) for factory, args in recipes],
            square_sum,
            stages=2,
            partition=[1, 2],
            microbatches=2,
            seed=5,
            world=start_world(shares_memory=shares_memory),
        )
        return plain.train_rank(pipe, data)

    assert plain.unite(processes(2, body, tmp_path), 2).distance(expected) < 1e-12


def reversed_range(count):
    return range(count)[::-1]


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu,),
]


@both_transports
def test_every_dtype_is_transferred_between_processes(processes, shares_memory, tmp_path):
    """Compares the bits of three messages of one channel."""
    channel = PlacedChannel(Channel(0, 1, 0), source_rank=0, destination_rank=1, tag=0)
    bits = torch.arange(32, dtype=torch.uint8).clamp(max=1)  # the valid bytes of bools

    def body(rank):
        world = start_world(shares_memory=shares_memory)
        transport = world.transport([channel])
        received = []
        for _ in range(3):
            if rank == 1:
                transport.post(channel, "training", 0)
                nest = transport.wait(channel, "training", 0).nest
                received += [[str(t.dtype), t.view(torch.uint8).tolist()] for t in nest]
            else:
                nest = [bits.view(dtype) for dtype in DTYPES]
                transport.send(channel, "training", 0, nest, 1)
            transport.finish()
        return received

    _, received = processes(2, body, tmp_path)
    assert received == [[str(dtype), bits.tolist()] for dtype in DTYPES] * 3
