"""outer.shard=flat takes optimizers that go element by element, and refuses the others by name.

Two steps on a small matrix, with gradients of unit size, had let those pass that clip by a norm,
that begin to do so after some steps, or that treat large matrices otherwise.
"""

import pytest
import torch
from torch import nn, optim

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError
from tests.cases.state_support import linear
from tests.support import batches, mean_square


def all_parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class ClipsAll(optim.SGD):
    """Clips by the norm over all its parameters, of which each rank has its own."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(all_parameters(self), 1.0)
        return super().step(closure)


class ClipsEach(optim.AdamW):
    """Clips the gradient of each parameter, if it is long."""

    def step(self, closure=None):
        for parameter in all_parameters(self):
            parameter.grad.div_(parameter.grad.norm().clamp_min(30.0) / 30.0)
        return super().step(closure)


class Plain(optim.Optimizer):
    """Descends by what `direction` makes of each gradient."""

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr})
        self.num_steps, self.history = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        self.history.append(self.num_steps)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.direction(parameter, parameter.grad))

    def direction(self, parameter, gradient):
        return gradient


class TrustsLate(Plain):
    """LARS, but for its first steps."""

    warmup = 5

    def direction(self, parameter, gradient):
        if self.num_steps <= self.warmup:
            return gradient
        return gradient * (parameter.norm() / gradient.norm().clamp_min(1e-9))


class TrustsMuchLater(TrustsLate):
    warmup = 100


class FactorsLargeOnes(Plain):
    """Adafactor, but for small matrices."""

    def direction(self, parameter, gradient):
        if parameter.dim() < 2 or min(parameter.shape) < 128:
            return gradient
        return gradient / gradient.square().mean(0, keepdim=True).sqrt()


class Centralises(Plain):
    """Takes the mean over each row off the gradients of matrices."""

    def direction(self, parameter, gradient):
        return gradient if parameter.dim() < 2 else gradient - gradient.mean(1, keepdim=True)


class SkipsZeros(optim.SGD):
    """Leaves a tensor alone, also its momentum, if its gradient is zero."""

    def step(self, closure=None):
        for parameter in all_parameters(self):
            if not parameter.grad.any():
                parameter.grad = None
        return super().step(closure)


class Wraps(optim.Optimizer):
    """Leaves the step to another optimizer, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step()


class Lion(Plain):
    """Chen and others, Symbolic discovery of optimization algorithms, 2023."""

    def direction(self, parameter, gradient):
        mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
        sign = (0.9 * mean + 0.1 * gradient).sign()
        mean.lerp_(gradient, 0.01)
        return sign


class OwnAdam(optim.Adam):
    """A class of the user's that changes nothing."""


def make():
    torch.manual_seed(0)
    return [linear(), nn.Tanh(), linear()]


REFUSED = {
    "clips all": lambda p: ClipsAll(p, lr=0.05),
    "clips each": lambda p: ClipsEach(p, lr=0.05),
    "trusts late": TrustsLate,
    "trusts much later": TrustsMuchLater,
    "factors large ones": FactorsLargeOnes,
    "centralises": Centralises,
    "skips zeros": lambda p: SkipsZeros(p, lr=0.05, momentum=0.9),
    "wraps one that clips": lambda p: Wraps(ClipsAll(p, lr=0.05)),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "Muon": lambda p: optim.Muon([each for each in p if each.dim() == 2], lr=0.05),
    "LBFGS": lambda p: optim.LBFGS(p),
}


def run(factory, shard, num_steps=8):
    models = [make() for _ in range(2)]

    def body(world):
        pipe = Pipeline(
            models[world.rank],
            mean_square,
            world=world,
            stages=1,
            replicas=2,
            microbatches=2,
            outer={"shard": shard},
        )
        generators = torch.get_rng_state()
        weights = [p.detach().clone() for p in pipe.parameters()]
        try:
            optimizer = pipe.optimizer(factory)
        except ConfigError as error:
            same = [torch.equal(p, w) for p, w in zip(pipe.parameters(), weights, strict=True)]
            return str(error), all(same) and torch.equal(generators, torch.get_rng_state())
        history = list(getattr(optimizer, "history", []))
        for inputs, targets in batches(num_steps):
            own = pipe.share(len(inputs))
            pipe.step(inputs[own], targets[own])
            optimizer.step()
        return {n: p.detach().clone() for n, p in pipe.named_parameters()}, history

    return run_on_threads(2, body)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizer_that_looks_across_elements_is_refused(name):
    for text, is_untouched in run(REFUSED[name], "flat"):
        assert "expected an optimizer that updates each element independently" in text
        assert is_untouched


TAKEN = {
    "SGD": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "two groups": lambda p: OwnAdam([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.05),
    "AdamW": lambda p: optim.AdamW(p, lr=0.05),
    "RAdam, which rectifies after some steps": lambda p: optim.RAdam(p, lr=0.05),
    "of a class of the user's": lambda p: OwnAdam(p, lr=0.05),
    "of the user's own": Plain,
    "Lion": Lion,
    "wrapped": lambda p: Wraps(OwnAdam(p, lr=0.05)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_optimizer_that_goes_element_by_element_trains_as_undivided(name):
    divided, whole = run(TAKEN[name], "flat"), run(TAKEN[name], "none")
    for (own, history), (expected, _) in zip(divided, whole, strict=True):
        assert not history  # a try leaves nothing behind
        for parameter in expected:
            torch.testing.assert_close(own[parameter], expected[parameter], rtol=1e-10, atol=1e-10)
