"""BatchNorm within a layer's own `torch.utils.checkpoint` counts one batch per step.

Regression: the layer's recomputation in the backward counted each micro-batch as a batch (five
instead of one), because it runs outside of gpipe_hpc's per-thread context.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import Pipeline, run_on_threads
from tests.support import assert_close, batch, cover_of, together, train_ranks

SAMPLES, MICROBATCHES = 12, 3


class Checkpointed(nn.Module):
    """Run the inner layers under `torch.utils.checkpoint`, or directly if `reentrant` is None."""

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
    """Add the gradient of a checkpointed layer, which is thus recomputed within the forward."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = Checkpointed(reentrant)

    def forward(self, x):
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(given).square().sum(), given)
        return x + slope


def train(reentrant, recompute, schedule="gpipe", replicas=1, kind=Checkpointed, **options):
    """Train for two steps; return losses, gradients and buffers merged over all ranks."""
    torch.manual_seed(0)
    made = nn.ModuleList([nn.Linear(4, 4), kind(reentrant), nn.Linear(4, 4), kind(reentrant)])
    settings = {"schedule": schedule, "recompute": recompute, "replicas": replicas, **options}
    ranks = train_ranks(
        list(made.double()),
        nn.functional.mse_loss,
        [batch(SAMPLES, dtype=torch.float64)] * 2,
        ranks=2 * replicas,
        microbatches=MICROBATCHES,
        partition=[2, 2],
        **settings,
    )
    return together(ranks)


@cover_of(
    "reentrant, recompute, schedule",
    (True, False),
    ("always", "except_last", "never"),
    ("gpipe", "one_f_one_b", "zb_h1"),
)
def test_checkpointed_batchnorm_counts_one_batch_per_step(reentrant, recompute, schedule):
    """The reference is the same layers without a checkpoint, tested in test_batchnorm.py."""
    ours = train(reentrant, recompute, schedule)
    assert_close(ours, train(None, "never"), 1e-10)
    counts = [b.item() for name, b in ours.buffers.items() if name.endswith("num_batches_tracked")]
    assert counts == [2, 2]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_recomputation_uses_the_statistics_of_all_replicas(reentrant, recompute):
    """Regression: the recomputation normalised the samples of its own replica only."""
    options = {"replicas": 2, "normalise_over_replicas": True}
    ours = train(reentrant, recompute, **options)
    assert_close(ours, train(None, "never", **options), 1e-10)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_self_differentiating_layer_equals_layer_without_checkpoint(recompute):
    """The checkpoint is recomputed within the forward, while reports are collected.

    torch.autograd.grad does not support reentrant checkpoints.
    """
    ours = train(False, recompute, kind=SelfDifferentiating)
    assert_close(ours, train(None, "never", kind=SelfDifferentiating), 1e-10)


def test_layer_called_by_the_user_between_steps_counts_a_batch():
    def body(world):
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)]
        pipe = Pipeline(layers, nn.functional.mse_loss, microbatches=2, world=world)
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
        layers[1](torch.randn(8, 4))
        return layers[1].num_batches_tracked.item()

    assert run_on_threads(1, body) == [2]
