"""Hooks that a layer puts on its input run once for each micro-batch, recomputed or not."""

import pytest
import torch
from torch import Tensor, nn

from tests.support import assert_close, batches, mean_square, together, train_plainly, train_ranks


class Hooked(nn.Module):
    """Scale the gradient of the input by -2, by one of several kinds of hooks."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hook = hook
        if hook == "module":
            self.register_full_backward_hook(lambda module, given, got: (-2 * given[0],))
        if hook == "module, ahead":
            self.register_full_backward_pre_hook(lambda module, got: (-2 * got[0],))

    def forward(self, x: Tensor) -> Tensor:
        if self.hook == "input" and x.requires_grad:
            x.register_hook(lambda gradient: -2 * gradient)
        if self.hook == "retained" and x.requires_grad:
            x.retain_grad()
            x.register_hook(lambda gradient: -2 * gradient)
        view = x[:, :2]
        if self.hook == "view" and view.requires_grad:
            view.register_hook(lambda gradient: -2 * gradient)
        if self.hook == "node, ahead" and x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda got: (-2 * got[0],))
        if self.hook == "node" and x.grad_fn is not None:
            x.grad_fn.register_hook(
                lambda given, got: tuple([None if each is None else -2 * each for each in given])
            )
        return torch.tanh(self.linear(torch.cat([view, x[:, 2:]], 1)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), torch.sin(self.other(x))


class HookedPair(nn.Module):
    """Put a hook of its own on each of two inputs, and pass one of them on."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = pair
        if first.requires_grad:
            first.register_hook(lambda gradient: -gradient)
        if second.requires_grad:
            second.register_hook(lambda gradient: 3 * gradient)
        return first * second, first


class Joined(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + 0.5 * pair[1]


HOOKS = ("input", "retained", "view", "node", "node, ahead", "module", "module, ahead")
RECOMPUTE = ("never", "except_last", "always")
DATA = batches(2)


def linear() -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.float64)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hooked_layer_has_the_gradients_of_a_plain_loop(hook, recompute):
    layers = [linear(), Hooked(hook).double(), Hooked(hook).double(), linear()]
    right = train_plainly(layers, mean_square, DATA)
    for counts in ([1, 3], [2, 2]):
        ours = train_ranks(
            layers,
            mean_square,
            DATA,
            ranks=2,
            microbatches=4,
            partition=counts,
            recompute=recompute,
        )
        assert_close(together(ours), right, 1e-12)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_each_of_several_inputs_has_its_own_hook(recompute):
    layers = [Pair().double(), HookedPair(), Joined(), linear()]
    right = train_plainly(layers, mean_square, DATA)
    for counts in ([1, 3], [2, 2]):
        ours = train_ranks(
            layers,
            mean_square,
            DATA,
            ranks=2,
            microbatches=4,
            partition=counts,
            recompute=recompute,
        )
        assert_close(together(ours), right, 1e-12)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "interleaved", "chimera"])
@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook != "node"])
def test_hooks_run_once_in_every_kind_of_schedule(hook, schedule):
    layers = [linear(), *(Hooked(hook).double() for _ in range(3))]
    right = train_plainly(layers, mean_square, DATA)
    ours = train_ranks(
        layers, mean_square, DATA, ranks=2, microbatches=4, partition="uniform",
        schedule=schedule, recompute="always",
    )  # fmt: skip
    assert_close(together(ours), right, 1e-12)


def test_a_hook_on_the_inputs_of_the_model_is_left_out_as_they_need_no_gradient():
    layers = [Hooked("input").double(), Hooked("input").double(), linear()]
    right = train_plainly(layers, mean_square, DATA)
    ours = train_ranks(layers, mean_square, DATA, ranks=1, microbatches=4, recompute="always")
    assert_close(together(ours), right, 1e-12)


def test_a_probe_runs_once_for_each_microbatch():
    seen: list[float] = []

    class Probe(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: seen.append(float(gradient.norm())))
            return torch.tanh(x)

    train_ranks(
        [linear(), Probe()], mean_square, DATA, ranks=2, microbatches=4, recompute="always",
        partition=[1, 1],
    )  # fmt: skip
    assert len(seen) == 4 * len(DATA)
