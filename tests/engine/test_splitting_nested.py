"""Layers that call autograd themselves: in a hook, in an autograd function or in the forward.

Each kind of backward must give the gradients of plain autograd: only `backward()` adds to the
gradient of a parameter, not a call of `torch.autograd.grad`.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads, torch_compat
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.errors import ModelError
from tests.engine.catalogue import PRODUCTS, SELF_DIFFERENTIATING, Pair, equilibrium, force
from tests.support import mean_square

MIDDLE = StageRoutes({-1: ()}, {1: ()})
whole_and_split = pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])


RUN = Run("test", lambda microbatch: lambda layer: 17, 1)


def runner_of(layer):
    stage = Stage(0, {0: layer}, HostDevice(), MIDDLE)
    stage.gradients.clear()
    return StageRunner(stage)


def run_engine(layer, boundary, splits, recomputes=False, num_steps=2):
    """Run micro-batches through a layer; return the gradients of input and parameters."""
    work = runner_of(layer)
    for number in range(num_steps):
        given = boundary.detach().requires_grad_()
        keep = RunMode.RECORD if recomputes else RunMode.TRAIN
        (output,) = work.forward(
            RUN, number, [given], len(given), ForwardPlan(keep, splits), Outcome()
        )
        if recomputes:
            work.recompute(RUN, number)
        (back,) = work.backward(number, [ramp(output)])
        if splits:
            work.weights(number)
    assert work.num_kept == 0
    return back, [p.grad for p in layer.parameters() if p.requires_grad]


def run_plain(layer, boundary, num_steps=2):
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(num_steps):
        given = boundary.detach().requires_grad_()
        output = layer(given)
        output.backward(ramp(output))
    return (given.grad,), [p.grad for p in layer.parameters() if p.requires_grad]


def ramp(output):
    return torch.linspace(0.1, 1, output.numel(), dtype=output.dtype).view(output.shape)


def assert_equals_autograd(make, splits, recomputes=False, shape=(5, 4)):
    boundary = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    expected = run_plain(make().double(), boundary)
    torch.manual_seed(0)
    found = run_engine(make().double(), boundary, splits, recomputes)
    assert expected[1] and expected[0][0].any()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@whole_and_split
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("function", SELF_DIFFERENTIATING, ids=lambda f: f.__name__)
def test_gradients_equal_those_of_plain_autograd(function, recomputes, splits):
    assert_equals_autograd(partial(Pair, function), splits, recomputes)


@pytest.mark.parametrize("function", SELF_DIFFERENTIATING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_split_products_in_self_differentiating_layers_are_right(kind, function):
    assert_equals_autograd(partial(Pair, function, PRODUCTS[kind]), True)


@whole_and_split
def test_complex_layer_that_differentiates_in_forward_is_right(splits):
    def slope(layer, x):
        with torch.enable_grad():
            z = torch.complex(x, x.flip(0))
            energy = layer.second(layer.first(z).sin()).abs().square().sum()
            (found,) = torch.autograd.grad(energy, z, create_graph=True)
        return found.real + found.imag

    kind = partial(nn.Linear, 4, 4, dtype=torch.complex128)
    assert_equals_autograd(partial(Pair, slope, kind), splits)


def hook_with_two_backwards(layer, x):
    y, aside = layer.second(x), layer.first(x.detach()).square().sum()
    if y.requires_grad:
        y.register_hook(lambda g: [aside.backward(retain_graph=True) for _ in range(2)] and None)
    return y


def test_two_backward_calls_in_a_hook_both_accumulate():
    assert_equals_autograd(partial(Pair, hook_with_two_backwards), True)


def backward_in_the_forward(layer, x):
    y = layer.first(x)
    if y.requires_grad:
        y.sum().backward(retain_graph=True)
    return y


def hook_with_backward_that_keeps_a_graph(layer, x):
    y, aside = layer.second(x), layer.first(x.detach()).square().sum()
    if y.requires_grad:
        y.register_hook(lambda g: aside.backward(create_graph=True))
    return y


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "function", [backward_in_the_forward, hook_with_backward_that_keeps_a_graph]
)
def test_backward_call_that_needs_weight_gradients_early_is_refused(function):
    with pytest.raises(ModelError, match=r"calls backward\(\) .* or with create_graph=True"):
        run_engine(Pair(function), torch.randn(5, 4), True)


def by_autograd_grad(y, weight):
    return torch.autograd.grad(y, [weight], retain_graph=True, allow_unused=True)[0]


def by_autograd_backward(y, weight):
    torch.autograd.backward(y, inputs=[weight], retain_graph=True)
    return weight.grad


def by_tensor_backward(y, weight):
    y.backward(inputs=weight, retain_graph=True)
    return weight.grad


@pytest.mark.parametrize(
    "differentiate", [by_autograd_grad, by_autograd_backward, by_tensor_backward]
)
@pytest.mark.parametrize("is_in_grad_mode", [False, True])
def test_forward_that_requests_gradient_of_its_weight_is_refused(differentiate, is_in_grad_mode):
    """Regression: torch returned None, because it found no path from the output to the weight."""

    def forward(layer, x):
        z = torch.tanh(layer.second(torch.tanh(layer.first(x))))
        if not z.requires_grad:
            return z
        energy = z.sum()
        with torch.set_grad_enabled(is_in_grad_mode):
            slope = differentiate(energy, layer.first.weight)
        return z * slope.sum()

    with pytest.raises(ModelError, match=r"with respect to a parameter \(4, 4\).*torch.func.grad"):
        run_engine(Pair(forward), torch.randn(5, 4), True)


@whole_and_split
def test_forward_may_request_gradient_of_parameter_used_elementwise(splits):
    def forward(layer, x):
        with torch.enable_grad():
            y = layer.first(x) * layer.second.bias
            (slope,) = torch.autograd.grad(y.sum(), layer.second.bias, create_graph=True)
        return layer.second(y + slope)

    assert_equals_autograd(partial(Pair, forward), splits)


def test_double_backward_of_split_bilinear_is_refused():
    """One input's gradient is a function of the other input, whose graph the split call lacks."""

    def bilinear(layer, x):
        with torch.enable_grad():
            y = F.bilinear(x, x.sin(), layer.weight)
            slope = torch.autograd.grad(y.sum(), x, create_graph=layer.creates)
        return y + slope[0]

    def make(creates):
        layer = Pair(bilinear)
        layer.weight, layer.creates = nn.Parameter(torch.randn(4, 4, 4)), creates
        return layer

    boundary = torch.randn(5, 4)
    run_engine(make(True), boundary, False)
    with pytest.raises(ModelError, match="a parameter and several inputs"):
        run_engine(make(True), boundary, True)


def test_double_backward_is_refused_if_weight_data_was_replaced():
    def noisy(layer, x):
        original = layer.first.weight.data
        layer.first.weight.data = original + 1
        y = layer.first(x)
        layer.first.weight.data = original
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + slope

    with pytest.raises(ModelError, match="was replaced after its forward"):
        run_engine(Pair(noisy), torch.randn(5, 4), True)


@pytest.mark.parametrize("function", [equilibrium, force])
def test_torch_without_will_engine_execute_gets_whole_backward(function, monkeypatch):
    monkeypatch.setattr(torch_compat, "will_engine_execute", torch_compat._absent)
    work = runner_of(Pair(function))
    (output,) = work.forward(
        RUN, 0, [torch.randn(5, 4)], 5, ForwardPlan(RunMode.TRAIN, True), Outcome()
    )
    work.backward(0, [ramp(output)])
    assert not work.weights(0), "W had a gradient to compute"
    assert_equals_autograd(partial(Pair, function), True)


@pytest.mark.parametrize(
    "function, schedule",
    [(equilibrium, "gpipe"), (force, "zb_h1"), (equilibrium, "zb_v"), (force, "auto")],
)
def test_pipeline_of_self_differentiating_layers_equals_autograd(function, schedule):
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 8, 4, dtype=torch.float64)
    model = nn.Sequential(*(Pair(function).double() for _ in range(4)))
    settings = {"schedule": schedule, "microbatches": 4}
    if schedule == "auto":
        settings |= {"partition": "time", "example": (inputs[:2], targets[:2])}

    def body(world):
        pipe = Pipeline(copy.deepcopy(model), mean_square, stages=2, world=world, **settings)
        pipe.step(inputs, targets)
        return {name: p.grad.clone() for name, p in pipe.named_parameters()}

    ranks = run_on_threads(2, body)
    mean_square(model(inputs), targets).backward()
    expected = {f"layers.{name}": p.grad for name, p in model.named_parameters()}
    assert sum(map(len, ranks)) == len(expected)
    for found in ranks:
        torch.testing.assert_close(found, {n: expected[n] for n in found}, rtol=1e-9, atol=1e-12)
