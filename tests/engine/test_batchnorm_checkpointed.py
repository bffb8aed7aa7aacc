"""BatchNorm inside a layer's own `torch.utils.checkpoint`: one batch a step, as without it.

What runs again within a backward, where nothing of ours is bound to the thread, once counted every
micro-batch for a batch (five where one was).
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import Pipeline, run_on_threads

SAMPLES, MICROBATCHES = 12, 3


class Checkpointed(nn.Module):
    """Run the inner layers under torch's own recomputation."""

    def __init__(self, reentrant, **options):
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0.1, **options), nn.Tanh()
        )

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class SelfDifferentiating(nn.Module):
    """Use the gradient of what it checkpoints, so that it is run again within the forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = Checkpointed(reentrant)

    def forward(self, x):
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(given).square().sum(), given)
        return x + slope


def train(reentrant, recompute, schedule="gpipe", replicas=1, kind=Checkpointed, **options):
    """Return losses, gradients and buffers of two steps, of all ranks together."""
    torch.manual_seed(0)
    made = nn.ModuleList([nn.Linear(4, 4), kind(reentrant), nn.Linear(4, 4), kind(reentrant)])
    made = list(made.double())
    inputs, targets = torch.randn(2, SAMPLES, 4, dtype=torch.float64)

    def body(world):
        pipe = Pipeline(
            copy.deepcopy(made),
            nn.functional.mse_loss,
            replicas=replicas,
            microbatches=MICROBATCHES,
            schedule=schedule,
            recompute=recompute,
            partition=[2, 2],
            world=world,
            **options,
        )
        part = pipe.share(SAMPLES)
        losses = [pipe.step(inputs[part], targets[part]).loss for _ in range(2)]
        buffers = {n: b for s in pipe.stages.values() for n, b in s.named_buffers().items()}
        return losses, {n: p.grad for n, p in pipe.named_parameters()}, buffers

    ranks = run_on_threads(2 * replicas, body)
    return (
        ranks[0][0],
        {name: gradient for rank in ranks for name, gradient in rank[1].items()},
        {name: buffer for rank in ranks for name, buffer in rank[2].items()},
    )


def assert_equal(ours, plain):
    assert ours[0] == pytest.approx(plain[0], rel=1e-12)
    for mine, theirs in zip(ours[1:], plain[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            near = value is theirs[name] is None or torch.allclose(
                value, theirs[name], rtol=1e-10, atol=1e-12
            )
            assert near, name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_counts_one_batch_a_step(reentrant, recompute, schedule):
    """The same layers without their own checkpoint are the reference; see test_batchnorm.py."""
    ours = train(reentrant, recompute, schedule)
    assert_equal(ours, train(None, "never"))
    counts = [b.item() for name, b in ours[2].items() if name.endswith("num_batches_tracked")]
    assert counts == [2, 2]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_runs_again_with_the_statistics_of_all_replicas(reentrant, recompute):
    """What ran again normalised its own replica's samples alone."""
    options = {"replicas": 2, "normalise_over_replicas": True}
    ours = train(reentrant, recompute, **options)
    assert_equal(ours, train(None, "never", **options))


@pytest.mark.parametrize("reentrant", [False])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_layer_that_differentiates_itself(reentrant, recompute):
    """Its checkpoint runs again amid the forward, while reports are taken."""
    ours = train(reentrant, recompute, kind=SelfDifferentiating)
    assert_equal(ours, train(None, "never", kind=SelfDifferentiating))


def test_outside_of_a_step_the_layer_is_torchs():
    """A layer of a pipeline that its owner runs himself, between steps, counts as ever."""

    def body(world):
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
        pipe = Pipeline(layers, nn.functional.mse_loss, microbatches=2, world=world)
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
        layers[1](torch.randn(8, 4))
        return layers[1].num_batches_tracked.item()

    assert run_on_threads(1, body) == [2]
