"""Hooks of parameters whose gradients are computed in W: each is called once."""

from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.errors import ModelError

MIDDLE = StageRoutes({-1: ()}, {1: ()})
whole_and_split = pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
BOUNDARY = torch.linspace(-1, 1, 20).view(5, 4)


class WeightUsedTwice(nn.Linear):
    """Use the weight also in an operation that cannot be split."""

    def forward(self, x):
        return super().forward(x) * self.weight.sum()


RUN = Run("test", lambda microbatch: lambda layer: 17, 1)


def nothing():
    pass


def run(layer, splits, *, after_forward=nothing, after_i=nothing, boundary_requires_grad=True):
    """Run one micro-batch; return the parameters' gradients. `after_i` is called before W."""
    stage = Stage(0, {0: layer}, HostDevice(), MIDDLE)
    stage.gradients.clear()
    work = StageRunner(stage)
    boundary = BOUNDARY.clone().requires_grad_(boundary_requires_grad)
    (output,) = work.forward(RUN, 0, [boundary], 5, ForwardPlan(RunMode.TRAIN, splits), Outcome())
    after_forward()
    work.backward(0, [torch.ones_like(output)])
    if splits:
        after_i()
        work.weights(0)
    return [p.grad for p in layer.parameters()]


def note_and_double(seen, gradient):
    seen.append(gradient.clone())
    return gradient * 2


def hook_each(layer, seen):
    """Register hooks that record and double each gradient, and record what is accumulated."""
    for parameter in layer.parameters():
        parameter.register_hook(partial(note_and_double, seen))
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


def by_autograd(layer):
    layer.zero_grad()
    layer(BOUNDARY.clone().requires_grad_()).sum().backward()
    return [p.grad.clone() for p in layer.parameters()]


@whole_and_split
@pytest.mark.parametrize("boundary_requires_grad", [True, False])
@pytest.mark.parametrize("when", ["before", "after the forward"])
def test_hooks_are_called_once_with_the_whole_gradient(when, boundary_requires_grad, splits):
    """Regression: hooks were called in I with None, as the node of a call depended on the weight.

    If the backward is split, the hooks are called in W.
    """
    layer, seen = nn.Linear(4, 3), []
    weight, bias = by_autograd(layer)
    layer.zero_grad()
    hooks = partial(hook_each, layer, seen)
    if when == "before":
        hooks()
        hooks = nothing
    found = run(
        layer,
        splits,
        after_forward=hooks,
        after_i=lambda: seen and pytest.fail("a hook was called in I"),
        boundary_requires_grad=boundary_requires_grad,
    )
    torch.testing.assert_close(found, [weight * 2, bias * 2])
    by_size = sorted(seen, key=torch.Tensor.numel)
    torch.testing.assert_close(by_size, [bias, bias * 2, weight, weight * 2])


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "zb_v"])
def test_hooks_registered_after_building_the_pipeline_are_called(schedule):
    def body(world):
        layers = [nn.Linear(4, 4) for _ in range(4)]
        settings = {"schedule": schedule, "microbatches": 3}
        pipe = Pipeline(layers, nn.functional.mse_loss, stages=2, world=world, **settings)
        inputs = torch.ones(6, 4)
        pipe.step(inputs, inputs)
        before = {name: p.grad.clone() for name, p in pipe.named_parameters()}
        calls = {name: [] for name in before}
        for name, parameter in pipe.named_parameters():
            parameter.register_hook(partial(note_and_double, calls[name]))
        pipe.step(inputs, inputs)
        for name, parameter in pipe.named_parameters():
            assert len(calls[name]) == 3
            torch.testing.assert_close(parameter.grad, before[name] * 2)

    run_on_threads(2, body)


def test_multi_grad_hook_is_called_once():
    layer, seen = nn.Linear(4, 3), []
    expected = by_autograd(layer)
    torch.autograd.graph.register_multi_grad_hook(tuple(layer.parameters()), seen.append)
    run(layer, True)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)


def test_hooks_of_accumulate_grad_node_are_called_once_in_w():
    layer, seen = nn.Linear(4, 3), []
    weight, _ = by_autograd(layer)
    layer.zero_grad()
    node = layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: seen.append(gradients[0].clone()))
    node.register_hook(lambda *_: seen.append(layer.weight.grad.clone()))
    run(
        layer,
        True,
        after_forward=lambda: seen.append("forward"),
        after_i=lambda: seen.append("I"),
    )
    assert seen[:2] == ["forward", "I"]
    torch.testing.assert_close(seen[2:], [weight, weight])


@whole_and_split
def test_hook_that_would_see_partial_gradients_is_refused(splits):
    """Regression: a hook that clips saw one part in I and another in W, but never the sum."""
    layer, seen = WeightUsedTwice(4, 3, bias=False), []
    (expected,) = by_autograd(layer)
    layer.zero_grad()
    torch.testing.assert_close(run(layer, splits), [expected])
    layer.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    layer.zero_grad()
    if splits:
        with pytest.raises(ModelError, match=r"\(3, 4\) with a hook is used .* called for each"):
            run(layer, splits)
    else:
        torch.testing.assert_close(run(layer, splits), [expected])
        torch.testing.assert_close(seen, [expected])
