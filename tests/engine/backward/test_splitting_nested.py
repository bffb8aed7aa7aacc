"""Layers that differentiate themselves anew: in a hook, in a function of their own, in the forward.

What plain autograd leaves is what every backward has to leave: only what `backward()` brings is
added to the gradient of a parameter, not what `torch.autograd.grad` was asked for by the way.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.comm.group import SoloGroup
from gpipe_hpc.engine.backward import joints
from gpipe_hpc.engine.routes import Edge, StageRoutes
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.work import Keep, Recipe, StageWork
from gpipe_hpc.errors import ModelError
from tests.support import mean_square

MIDDLE = StageRoutes((Edge(-1),), (Edge(1),))
each_way = pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])


class Nobody:
    """Take no notice of what layers report."""

    def note(self, part, noted):
        return []


def linear():
    return nn.Linear(4, 4)


class Apply(nn.Module):
    """Turn a function of (layer, input) into a layer that has two others of a kind."""

    def __init__(self, function, kind=linear):
        super().__init__()
        self.function = function
        self.first, self.second = kind(), kind()

    def forward(self, x):
        return self.function(self, x)


def key(layer):
    return 17


def work_of(layer):
    stage = Stage(0, {0: layer}, torch.device("cpu"), MIDDLE)
    stage.gradients.clear(SoloGroup(0))
    return StageWork(stage, Nobody())


def engine(layer, boundary, splits, recomputes=False, num_steps=2):
    """Run micro-batches through a layer; return the input's gradient and the parameters'."""
    work = work_of(layer)
    for number in range(num_steps):
        given = boundary.detach().requires_grad_()
        keep = Keep.INPUT if recomputes else Keep.GRAPH
        (output,) = work.forward(number, [given], len(given), key, Recipe(keep, splits))
        if recomputes:
            work.recompute(number, key)
        (back,) = work.backward(number, [ramp(output)])
        if splits:
            work.weights(number)
    assert work.num_kept == 0
    return back, [p.grad for p in layer.parameters() if p.requires_grad]


def plain(layer, boundary, num_steps=2):
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(num_steps):
        given = boundary.detach().requires_grad_()
        output = layer(given)
        output.backward(ramp(output))
    return (given.grad,), [p.grad for p in layer.parameters() if p.requires_grad]


def ramp(output):
    return torch.linspace(0.1, 1, output.numel(), dtype=output.dtype).view(output.shape)


def compare(make, splits, recomputes=False, shape=(5, 4)):
    boundary = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    expected = plain(make().double(), boundary)
    torch.manual_seed(0)
    found = engine(make().double(), boundary, splits, recomputes)
    assert expected[1] and expected[0][0].any()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class ByMatrix(nn.Module):
    """Multiply with a parameter by a given function."""

    def __init__(self, product):
        super().__init__()
        self.product, self.weight = product, nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x):
        return self.product(x, self.weight)


class Convolution(nn.Conv1d):
    def __init__(self):
        super().__init__(1, 1, 3, padding=1)

    def forward(self, x):
        return super().forward(x[:, None])[:, 0]


class OnlyBias(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.weight.requires_grad_(False)


KINDS = {
    "matmul": lambda: ByMatrix(torch.matmul),
    "einsum": lambda: ByMatrix(partial(torch.einsum, "bi,ij->bj")),
    "a matrix from the left": lambda: ByMatrix(lambda x, w: (w @ x.t()).t()),
    "convolution": Convolution,
    "frozen weight": OnlyBias,
    "no bias": lambda: nn.Linear(4, 4, bias=False),
}


def fixed_point(function, start):
    for _ in range(200):
        start, before = function(start), start
        if (start - before).norm() < 1e-14:
            break
    return start


def equilibrium(layer, x):
    """The layer of the tutorial "Deep implicit layers" (Kolter, Duvenaud, Johnson 2020)."""

    def f(z):
        return torch.tanh(layer.first(z) * 0.3 + layer.second(x))

    with torch.no_grad():
        z = fixed_point(f, torch.zeros_like(x))
    if not torch.is_grad_enabled():
        return z
    z = f(z)
    z0 = z.clone().detach().requires_grad_()
    f0 = f(z0)

    def solve(gradient):
        def step(y):
            return torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + gradient

        return fixed_point(step, gradient)

    z.register_hook(solve)
    return z


def regularised_equilibrium(layer, x):
    """With the norm of the Jacobian beside it (Bai, Koltun, Kolter 2021)."""
    z = equilibrium(layer, x)
    with torch.enable_grad():
        z0 = z.detach().requires_grad_()
        f0 = torch.tanh(layer.first(z0) * 0.3 + layer.second(x))
        (v,) = torch.autograd.grad(f0, z0, torch.ones_like(f0), create_graph=True)
    return z + v.square()


def hook_on_its_own_linear(layer, x):
    z = layer.first(x)
    y = layer.second(torch.tanh(z))
    likeness, y = y.square().sum(), y * 1
    if y.requires_grad:
        y.register_hook(lambda g: g + torch.autograd.grad(likeness, [z], retain_graph=True)[0])
    return y


def hook_with_a_graph(layer, x):
    z = layer.first(x)
    y = layer.second(torch.tanh(z))
    likeness, y = y.square().sum(), y * 1

    def hook(gradient):
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(likeness, z, create_graph=True)
            (bend,) = torch.autograd.grad(slope.square().sum(), z, retain_graph=True)
        return gradient + bend

    if y.requires_grad:
        y.register_hook(hook)
    return y


def hook_with_backward_to_an_input(layer, x):
    z0 = torch.ones_like(x).requires_grad_()
    y, y0 = layer.second(layer.first(x)), layer.first(z0)

    def hook(gradient):
        y0.backward(gradient, inputs=[z0], retain_graph=True)
        given, z0.grad = z0.grad, None
        return gradient + given

    if y.requires_grad:
        y.register_hook(hook)
    return y


def hook_with_backward(layer, x):
    """What comes by `backward()` in a hook adds to `.grad`, whose it may be."""
    y, aside = layer.second(x), layer.first(x.detach()).square().sum()
    if y.requires_grad:
        y.register_hook(lambda g: aside.backward())
    return y


def slope_alone(layer, x):
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        energy = layer.second(torch.tanh(layer.first(given))).square().sum()
        (slope,) = torch.autograd.grad(energy, given)
    return layer.first(x) + layer.second(x + slope)


def slope_of_the_same_graph(layer, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = layer.second(torch.tanh(layer.first(x)))
        (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return y + slope


def force(layer, x):
    """Energy and force, as models of molecules have them."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = layer.second(torch.tanh(layer.first(x))).square().sum(-1, keepdim=True)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy - slope


def penalty(layer, x):
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = layer.second(torch.tanh(layer.first(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + (slope.norm(dim=-1, keepdim=True) - 1).square()


def bend(layer, x):
    """Second derivatives, as the residual of a differential equation has them."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = layer.second(torch.tanh(layer.first(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        return y + second


def jacobian(layer, x):
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        y = layer.second(torch.tanh(layer.first(given))).sum(0)
        (found,) = torch.autograd.grad(y, given, torch.eye(4).to(y), is_grads_batched=True)
    return layer.first(x) + layer.second(x + found.sum(0))


class _Inner(torch.autograd.Function):
    """Keep a graph from the forward, and run it in the backward."""

    @staticmethod
    def forward(ctx, x, layer, way, *parameters):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer.second(torch.tanh(layer.first(ctx.x)))
        ctx.way, ctx.parameters = way, parameters
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.way == "backward":
            torch.autograd.backward(ctx.y, gradient)
            return ctx.x.grad, *[None] * (2 + len(ctx.parameters))
        wanted = (ctx.x, *ctx.parameters)
        given, *rest = torch.autograd.grad(ctx.y, wanted, gradient, allow_unused=True)
        return given, None, None, *rest


def inner_backward(layer, x):
    return _Inner.apply(x, layer, "backward")


def inner_slope(layer, x):
    return _Inner.apply(x, layer, "grad") + layer.second(layer.first(x))


def inner_gradients(layer, x):
    return _Inner.apply(x, layer, "grad", *(p for p in layer.parameters() if p.requires_grad))


FUNCTIONS = [
    equilibrium,
    regularised_equilibrium,
    hook_on_its_own_linear,
    hook_with_a_graph,
    hook_with_backward_to_an_input,
    hook_with_backward,
    slope_alone,
    slope_of_the_same_graph,
    force,
    penalty,
    bend,
    jacobian,
    inner_backward,
    inner_slope,
    inner_gradients,
]


@each_way
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_autograd(function, recomputes, splits):
    compare(partial(Apply, function), splits, recomputes)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_other_functions_of_a_parameter(kind, function):
    compare(partial(Apply, function, KINDS[kind]), True)


@each_way
def test_complex_weights_and_their_slopes(splits):
    def slope(layer, x):
        with torch.enable_grad():
            z = torch.complex(x, x.flip(0))
            energy = layer.second(layer.first(z).sin()).abs().square().sum()
            (found,) = torch.autograd.grad(energy, z, create_graph=True)
        return found.real + found.imag

    kind = partial(nn.Linear, 4, 4, dtype=torch.complex128)
    compare(partial(Apply, slope, kind), splits)


def hook_with_two_backwards(layer, x):
    y, aside = layer.second(x), layer.first(x.detach()).square().sum()
    if y.requires_grad:
        y.register_hook(lambda g: [aside.backward(retain_graph=True) for _ in range(2)] and None)
    return y


def test_two_backwards_in_a_hook_add_both():
    compare(partial(Apply, hook_with_two_backwards), True)


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
def test_what_would_need_gradients_of_parameters_at_once_is_refused(function):
    with pytest.raises(ModelError, match=r"calls backward\(\) on .* or with create_graph"):
        engine(Apply(function), torch.randn(5, 4), True)


def asked_of_grad(y, wanted):
    return torch.autograd.grad(y, [wanted], retain_graph=True, allow_unused=True)[0]


def asked_of_backward(y, wanted):
    torch.autograd.backward(y, inputs=[wanted], retain_graph=True)
    return wanted.grad


def asked_of_the_tensor(y, wanted):
    y.backward(inputs=wanted, retain_graph=True)
    return wanted.grad


@pytest.mark.parametrize("ask", [asked_of_grad, asked_of_backward, asked_of_the_tensor])
@pytest.mark.parametrize("is_in_grad_mode", [False, True])
def test_a_forward_that_asks_for_a_gradient_of_its_weight_is_refused(ask, is_in_grad_mode):
    """Torch once returned None, for it found no way from the output to the weight."""

    def forward(layer, x):
        z = torch.tanh(layer.second(torch.tanh(layer.first(x))))
        if not z.requires_grad:
            return z
        energy = z.sum()
        with torch.set_grad_enabled(is_in_grad_mode):
            slope = ask(energy, layer.first.weight)
        return z * slope.sum()

    with pytest.raises(ModelError, match=r"with respect to a parameter \(4, 4\).*torch.func.grad"):
        engine(Apply(forward), torch.randn(5, 4), True)


@each_way
def test_a_forward_may_ask_for_gradients_of_other_parameters(splits):
    def forward(layer, x):
        with torch.enable_grad():
            y = layer.first(x) * layer.second.bias
            (slope,) = torch.autograd.grad(y.sum(), layer.second.bias, create_graph=True)
        return layer.second(y + slope)

    compare(partial(Apply, forward), splits)


def test_slopes_of_a_product_of_two_inputs_need_a_whole_backward():
    """The one input's gradient is a function of the other, whose graph the call has not."""

    def bilinear(layer, x):
        with torch.enable_grad():
            y = F.bilinear(x, x.sin(), layer.weight)
            slope = torch.autograd.grad(y.sum(), x, create_graph=layer.creates)
        return y + slope[0]

    def make(creates):
        layer = Apply(bilinear)
        layer.weight, layer.creates = nn.Parameter(torch.randn(4, 4, 4)), creates
        return layer

    boundary = torch.randn(5, 4)
    engine(make(True), boundary, False)
    with pytest.raises(ModelError, match="a parameter and several inputs"):
        engine(make(True), boundary, True)


def test_slopes_of_a_weight_that_was_swapped_are_refused():
    def noisy(layer, x):
        kept = layer.first.weight.data
        layer.first.weight.data = kept + 1
        y = layer.first(x)
        layer.first.weight.data = kept
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + slope

    with pytest.raises(ModelError, match="was replaced between"):
        engine(Apply(noisy), torch.randn(5, 4), True)


@pytest.mark.parametrize("function", [equilibrium, force])
def test_a_torch_that_cannot_tell_gets_whole_backwards(function, monkeypatch):
    monkeypatch.setattr(joints, "_will_execute", None)
    work = work_of(Apply(function))
    (output,) = work.forward(0, [torch.randn(5, 4)], 5, key, Recipe(Keep.GRAPH, True))
    work.backward(0, [ramp(output)])
    assert not work.weights(0), "nothing was left for W"
    compare(partial(Apply, function), True)


@pytest.mark.parametrize(
    "function, schedule",
    [(equilibrium, "gpipe"), (force, "zb_h1"), (equilibrium, "zb_v"), (force, "auto")],
)
def test_pipelines(function, schedule):
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, 8, 4, dtype=torch.float64)
    model = nn.Sequential(*(Apply(function).double() for _ in range(4)))
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
