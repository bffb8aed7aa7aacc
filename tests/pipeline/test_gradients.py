"""Losses and gradients of `Pipeline` in edge cases."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from tests.support import batch, linears, mean_square

WIDTH = 4


@pytest.mark.parametrize("before", ["accumulated", "none", "users own"])
def test_step_replaces_gradients(before):
    def body(world):
        pipe = Pipeline(linears(2), mean_square, microbatches=2, world=world)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
        pipe.step(*batch())
        expected = [p.grad.clone() for p in pipe.parameters()]
        if before == "none":
            optimizer.zero_grad(set_to_none=True)
        if before == "users own":
            for parameter in pipe.parameters():
                parameter.grad = torch.ones_like(parameter)
        pipe.step(*batch())
        return [torch.equal(p.grad, e) for p, e in zip(pipe.parameters(), expected, strict=True)]

    assert run_on_threads(2, body) == [[True, True]] * 2


def test_mean_loss_and_pair_loss_give_equal_gradients():
    """Micro-batches have 3, 3 and 2 samples, so averaging their means would be wrong."""
    inputs, targets = batch(8)

    def pair(output, target):
        return (output - target).square().sum() / WIDTH, torch.tensor(len(output))

    def run(loss_fn):
        def body(world):
            pipe = Pipeline(linears(2), loss_fn, microbatches=3, world=world)
            result = pipe.step(inputs, targets)
            return result, [p.grad for p in pipe.parameters()]

        return run_on_threads(2, body)

    means, pairs = run(mean_square), run(pair)
    for (mean, mean_grads), (total, pair_grads) in zip(means, pairs, strict=True):
        assert mean.weight == total.weight == 8.0
        assert mean.loss == pytest.approx(total.loss, rel=1e-6)
        for left, right in zip(mean_grads, pair_grads, strict=True):
            torch.testing.assert_close(left, right)


def test_zero_weight_gives_zero_loss_and_gradients():
    def loss_fn(output, target):
        total = F.cross_entropy(output, target, reduction="sum", ignore_index=-100)
        return total, (target != -100).sum()

    def body(world):
        pipe = Pipeline(linears(2), loss_fn, replicas=2, microbatches=2, world=world)
        inputs, ignored = torch.randn(4, WIDTH), torch.full((4,), -100)
        result = pipe.step(inputs, ignored)
        gradients = [p.grad.clone() for p in pipe.parameters()]
        # The next step starts its backward from this weight, and must be correct again.
        later = pipe.step(inputs, torch.zeros(4, dtype=torch.long)).loss
        return result.loss, result.weight, gradients, later

    for loss, weight, gradients, later in run_on_threads(4, body):
        assert (loss, weight) == (0.0, 0.0) and later > 0
        assert all(g.abs().max() == 0 for g in gradients)


def test_empty_batch_leaves_no_gradients():
    def body(world):
        pipe = Pipeline(linears(2), mean_square, microbatches=2, world=world)
        inputs, targets = batch(0)
        result = pipe.step(inputs, targets)
        return result.loss, result.weight, [p.grad for p in pipe.parameters()]

    assert run_on_threads(2, body) == [(0.0, 0.0, [None, None])] * 2


def test_frozen_parameter_has_no_gradient_until_unfrozen():
    def body(world):
        layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        layers[0].weight.requires_grad_(False)
        pipe = Pipeline(layers, mean_square, microbatches=2, world=world)
        pipe.step(*batch())
        frozen = [p.grad is None for p in pipe.parameters()]
        layers[0].weight.requires_grad_(True)
        pipe.step(*batch())
        return frozen, [p.grad is None for p in pipe.parameters()]

    assert run_on_threads(2, body) == [
        ([True, False], [False, False]),
        ([False, False], [False, False]),
    ]


def test_parameter_used_on_one_replica_gets_equal_gradients_on_all():
    class Maybe(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x[0, 0] > 0 else x

    def body(world):
        layer = Maybe(WIDTH, WIDTH)
        pipe = Pipeline([layer, nn.Identity()], mean_square, replicas=2, world=world)
        inputs = torch.tensor([[1.0] * WIDTH, [-1.0] * WIDTH])
        pipe.step(inputs[pipe.share(2)], torch.zeros(1, WIDTH))
        used = layer.weight.grad.clone()
        pipe.step(-torch.ones(1, WIDTH), torch.zeros(1, WIDTH))
        return used, layer.weight.grad

    (first, none), (second, also_none) = run_on_threads(2, body)
    assert torch.equal(first, second) and first.abs().max() > 0
    assert none is None and also_none is None


def test_step_returns_the_loss_of_each_global_microbatch():
    inputs, targets = torch.zeros(5, WIDTH), torch.arange(5.0).view(5, 1).expand(5, WIDTH)

    def body(world):
        pipe = Pipeline(
            [nn.Identity()], mean_square, stages=1, replicas=2, microbatches=3, world=world
        )
        part = pipe.share(5)
        result = pipe.step(inputs[part], targets[part])
        return result.loss, result.microbatch_losses

    for loss, losses in run_on_threads(2, body):
        assert losses == [0.0, 1.0, 4.0, 9.0, 16.0, 0.0]
        assert loss == 6.0


def test_dropout_differs_between_steps_and_repeats_between_runs():
    def body(world):
        pipe = Pipeline([nn.Dropout(0.5)], mean_square, microbatches=2, seed=4, world=world)
        return [pipe.step(*batch()).loss for _ in range(3)]

    (losses,) = run_on_threads(1, body)
    assert len(set(losses)) == 3
    assert run_on_threads(1, body) == [losses]


def test_clipping_returns_the_global_norm_on_every_rank():
    def body(world):
        pipe = Pipeline(linears(3), mean_square, microbatches=2, world=world)
        pipe.step(*batch())
        before = [p.grad.clone() for p in pipe.parameters()]
        norm = pipe.clip_grad_norm_(float("inf"))
        assert all(torch.equal(p.grad, b) for p, b in zip(pipe.parameters(), before, strict=True))
        assert torch.equal(pipe.clip_grad_norm_(0.01), norm)
        return norm, before, [p.grad for p in pipe.parameters()]

    ranks = run_on_threads(3, body)
    expected = torch.cat([g.flatten() for _, before, _ in ranks for g in before]).norm()
    for norm, before, after in ranks:
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        for left, right in zip(after, before, strict=True):
            torch.testing.assert_close(left, right * (0.01 / expected))


class Shift(nn.Module):
    """Adds two vectors through views, so autograd gives both gradients the same memory."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Parameter(torch.zeros(WIDTH))
        self.second = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x):
        shift = self.first.view(2, 2) + self.second.view(2, 2)
        return self.linear(x + shift.view(1, WIDTH))


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_gradients_that_share_memory_accumulate_separately(schedule, microbatches):
    """Otherwise adding to one gradient would also change the other.

    With one sample per micro-batch, the gradient sent to the previous stage shares this memory.
    """
    inputs, targets = batch(8)
    torch.manual_seed(0)
    layers = [Shift().double() for _ in range(2)]
    whole = nn.Sequential(*layers)
    loss = mean_square(whole(inputs.double()), targets.double())
    expected = torch.autograd.grad(loss, list(whole.parameters()))

    def body(world):
        pipe = Pipeline(
            layers, mean_square, microbatches=microbatches, schedule=schedule, world=world
        )
        for _ in range(2):
            pipe.step(inputs.double(), targets.double())
        return {name: p.grad for name, p in pipe.named_parameters()}

    got = {name: g for rank in run_on_threads(2, body) for name, g in rank.items()}
    for (name, _), gradient in zip(whole.named_parameters(), expected, strict=True):
        torch.testing.assert_close(got[f"layers.{name}"], gradient, rtol=1e-10, atol=1e-12)


class TwiceUsed(nn.Module):
    """Uses the weight of a linear layer a second time, in a sum with another parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6, bias=False)
        self.other = nn.Parameter(torch.zeros(6 * 8))

    def forward(self, x):
        output = self.linear(x)
        # Created later, so its backward runs before that of the layer.
        total = (self.linear.weight.view(-1) + self.other.view(-1)).view(6, 8)
        return output + x @ (1.0 * total).t()


class Lookup(nn.Module):
    """Uses the weight of a linear layer a second time, with a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 12, bias=False)

    def forward(self, x):
        rows = torch.arange(len(x))
        return self.linear(x) + F.embedding(rows, self.linear.weight, sparse=True).repeat(1, 2)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("layer_of", [TwiceUsed, Lookup])
def test_weight_gradients_of_both_i_and_w_are_summed(layer_of, microbatches, schedule):
    """The gradient of I may share memory until W runs, or be sparse."""
    torch.manual_seed(0)
    layer = layer_of().double()
    inputs = torch.randn(6, layer.linear.in_features, dtype=torch.float64)
    targets = torch.randn(6, layer.linear.out_features, dtype=torch.float64)
    expected = {}
    for first in range(0, 6, 6 // microbatches):
        part = slice(first, first + 6 // microbatches)
        loss = mean_square(layer(inputs[part]), targets[part]) / microbatches
        for name, parameter in layer.named_parameters():
            (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            expected[name] = expected.get(name, 0) + dense
    pipe = Pipeline([layer], mean_square, microbatches=microbatches, schedule=schedule)
    pipe.step(inputs, targets)
    for name, gradient in expected.items():
        got = layer.get_parameter(name).grad
        torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-12)
