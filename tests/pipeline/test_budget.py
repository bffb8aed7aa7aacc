"""`recompute="budget"` recomputes only layers that do not fit; gradients stay the same."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.schedule import Op

WIDTH, SAMPLES, MICROBATCHES = 8, 64, 4
INPUTS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
PIECE = SAMPLES // MICROBATCHES


class Block(nn.Module):
    """A layer that keeps far more activations than its input, and counts its runs."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH))
        self.num_runs = 0

    def forward(self, x):
        self.num_runs += 1
        return self.layers(x)


SIZES = (16, 32, 64, 64, 32, 16)


def trained(recompute, schedule="one_f_one_b", **settings):
    """Return for each rank: expected runs of recomputed layers, actual runs, and gradients."""

    def body(world):
        pipe = Pipeline(
            [LayerSpec(Block, inner) for inner in SIZES],
            nn.functional.mse_loss,
            microbatches=MICROBATCHES,
            schedule=schedule,
            partition=[3, 3],
            recompute=recompute,
            optimizer_states=0,
            example=(INPUTS[:PIECE], INPUTS[:PIECE]),
            world=world,
            **settings,
        )
        blocks = {i: layer for stage in pipe.stages.values() for i, layer in stage.layers.items()}
        for block in blocks.values():
            block.num_runs = 0
        pipe.step(INPUTS, INPUTS)
        runs = {i: block.num_runs for i, block in blocks.items()}
        # A backward directly after its forward has no R, whichever layers would be recomputed.
        num_recomputations = [0] * len(pipe.stages) * world.size
        for row in pipe.schedule.ranks if world.rank == 0 else ():  # only rank 0 has all rows
            for action in row:
                num_recomputations[action.stage] += action.op is Op.R
        expected = {
            i: MICROBATCHES + number * (i in layers)
            for layers, number in zip(
                pipe.layout.recomputed or [(), ()], num_recomputations, strict=True
            )
            for i in layers
        }
        return expected, runs, {n: p.grad for n, p in pipe.named_parameters()}

    return run_on_threads(2, body)


def recomputed_layers(ranks):
    """Return the layers that a step recomputed; assert that they are the expected ones."""
    expected = {i: number for i, number in ranks[0][0].items() if number > MICROBATCHES}
    runs = {i: number for _, each, _ in ranks for i, number in each.items()}
    assert {i: number for i, number in runs.items() if number != MICROBATCHES} == expected
    return set(expected)


def assert_same_gradients(left, right):
    for (_, _, ours), (_, _, theirs) in zip(left, right, strict=True):
        assert ours.keys() == theirs.keys() and ours
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("schedule", "limits"),
    [("gpipe", (1e6, 55e3, 50e3, 36e3)), ("one_f_one_b", (1e6, 40e3, 36e3, 34e3))],
)
def test_less_memory_recomputes_more_layers(schedule, limits):
    plain = trained("never", schedule)
    assert recomputed_layers(plain) == set()
    found = []
    for memory_bytes in limits:
        ranks = trained("budget", schedule, memory_bytes=memory_bytes)
        assert_same_gradients(ranks, plain)
        found.append(len(recomputed_layers(ranks)))
    assert found[0] == 0 and found == sorted(set(found)), found


def test_too_little_memory_error_lists_what_needs_memory():
    with pytest.raises(GpipeError, match=r"nothing fits: weights, gradients"):
        trained("budget", memory_bytes=1e3)
