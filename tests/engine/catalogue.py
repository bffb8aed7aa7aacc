"""A catalogue of layers; test_catalogue.py checks all properties for each entry.

All layers map (samples, 4) to (samples, 4) in float64. To test a new kind of layer, add one entry
to `LAYERS`. Other tests import some of the layers for further checks.
"""

import random
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 4, 16
LARGE = 10_000  # factor that makes a buffer too large to be copied in advance


def linear():
    return nn.Linear(4, 4)


class Pair(nn.Module):
    """A layer that applies a function of (layer, input); it contains two inner layers of a kind."""

    def __init__(self, function, kind=linear):
        super().__init__()
        self.function = function
        self.first, self.second = kind(), kind()

    def forward(self, x):
        return self.function(self, x)


class ByMatrix(nn.Module):
    """Multiply the input by a parameter, with a given product function."""

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


PRODUCTS = {
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
    """Deep equilibrium layer as in the tutorial "Deep implicit layers" (Kolter et al., 2020)."""

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
    """Deep equilibrium layer plus the norm of its Jacobian (Bai, Koltun, Kolter, 2021)."""
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
    """Call `backward()` in a hook, which adds to the `.grad` of parameters."""
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
    """Return energy minus force, the gradient of the energy, as models of molecules compute it."""
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
    """Add second derivatives, as in the residual of a differential equation."""
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
    """Build a graph in the forward, and differentiate it in the backward."""

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


SELF_DIFFERENTIATING = [
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


class Averaged(nn.Linear):
    """Subtract a moving average, which is updated in place."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.average)


class Reassigned(nn.Linear):
    """Subtract a moving average, which is a new tensor after each forward."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x - self.average)


class Counter(nn.Linear):
    """Scale by the number of forwards, a buffer."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return super().forward(x) * (1 + self.count)


class SavedInPlace(nn.Linear):
    """Multiply by a buffer that autograd saves and that the next forward modifies in place."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        self.scale.mul_(0.7).add_(x.detach().abs().mean(0), alpha=0.1)
        return super().forward(x) * self.scale


class ThroughData(nn.Linear):
    """Modify a large and a small buffer through `.data`, which does not change their versions."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("small", torch.ones(WIDTH))
        self.register_buffer("large", torch.ones(WIDTH * LARGE))

    def forward(self, x):
        self.small.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.large.data = self.large.data * 0.9 + 0.1 * x.detach().abs().mean()
        return super().forward(x - self.small) * self.large[:WIDTH]


class ReplacedWithAlias(nn.Linear):
    """Replace a buffer in each forward; an attribute keeps a reference to its first tensor."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x):
        if not hasattr(self, "first"):
            self.first = self.scale
        self.scale = self.scale + x.detach().abs().mean(0)
        return super().forward(x) * self.scale - 0 * self.first


class Large(nn.Linear):
    """Modify a large buffer in place, a part of which autograd saves."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("large", torch.ones(WIDTH * LARGE))

    def forward(self, x):
        self.large.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return super().forward(x) * self.large[:WIDTH]


class LazyBuffer(nn.Linear):
    """Register a buffer in the first forward."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach().mean(0))
        else:
            self.first = self.first + 0.1
        return super().forward(x - self.first)


class Started(nn.Linear):
    """Initialize a buffer from the first input, and leave it unchanged afterwards."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x):
        if not self.is_set:
            self.centre.copy_(x.detach().mean(0))
            self.is_set.fill_(True)
        return super().forward(x - self.centre)


class Late(nn.Linear):
    """Leave a buffer unchanged for five forwards, then modify it."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("late", torch.ones(WIDTH))

    def forward(self, x):
        self.count += 1
        if self.count > 5:
            self.late.mul_(1.5)
        return super().forward(x) * self.late[:WIDTH]


class Shared(nn.Module):
    """Two modules that share a buffer, which both modify."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Averaged(), Averaged()
        self.second.average = self.first.average

    def forward(self, x):
        return self.second(self.first(x))


def spectral():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def spectral_by_hook():
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


def nested():
    return nn.Sequential(nn.Tanh(), nn.Sequential(Averaged(), Counter()))


STATEFUL = {
    "averaged": Averaged,
    "reassigned": Reassigned,
    "counter": Counter,
    "saved": SavedInPlace,
    "spectral": spectral,
    "spectral-hook": spectral_by_hook,
    "nested": nested,
    "lazy": LazyBuffer,
    "started": Started,
    "late": Late,
    "shared": Shared,
    "data": ThroughData,
    "large": Large,
    "replaced": ReplacedWithAlias,
}


class Draw(nn.Linear):
    """Linear layer whose output is scaled by random numbers from `draw`."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) * (1 + self.draw())


class FromPython(Draw):
    def draw(self):
        return random.random() + random.gauss(0, 0.1)


class FromNumpy(Draw):
    def draw(self):
        return np.random.rand() + 0.1 * np.random.randn()


class FromAll(Draw):
    """Draw from all global generators and from generators in attributes."""

    def __init__(self):
        super().__init__()
        self.second = torch.Generator()
        self.first = random.Random(0)
        self.third = np.random.default_rng(0)
        self.old = np.random.RandomState(0)

    def draw(self):
        own = torch.rand(1, generator=self.second).item() + self.first.random()
        return own + self.third.random() + self.old.rand() + random.random() + torch.rand(1).item()


class FromOwn(Draw):
    """Draw from a torch generator in a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.generator = torch.Generator().manual_seed(1)

    def draw(self):
        return torch.rand(WIDTH, generator=self.inner.generator, dtype=torch.float64)


class Dropping(Draw):
    """Draw a random number of random numbers."""

    def draw(self):
        return sum(random.random() for _ in range(random.randrange(1, 5)))


DRAWING = {each.__name__: each for each in (FromPython, FromNumpy, FromAll, FromOwn, Dropping)}


def seed_all(plain, layer_key, layer):
    """Seed all generators according to the published formula."""

    def key(source):
        return plain.key(3, layer_key, source)

    torch.default_generator.manual_seed(layer_key)
    random.seed(key(0))
    np.random.seed([key(1) % 2**32, key(1) >> 32])
    own = [
        (name, value)
        for prefix, part in layer.named_modules()
        for name, value in ((f"{prefix}.{n}", v) for n, v in sorted(vars(part).items()))
        if isinstance(
            value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState
        )
    ]
    for place, (_, value) in enumerate(own):
        source = key(2 + place)
        words = [source % 2**32, source >> 32]
        if isinstance(value, torch.Generator):
            value.manual_seed(source)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.PCG64(words).state
        else:
            value.seed(source if isinstance(value, random.Random) else words)


class _Into(torch.autograd.Function):
    """Matrix product that writes output and gradient into existing memory."""

    @staticmethod
    def forward(ctx, x, weight, output, gradient):
        ctx.save_for_backward(x, weight)
        ctx.gradient = gradient
        torch.mm(x.detach(), weight.detach(), out=output)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        torch.mm(given, weight.T, out=ctx.gradient)
        return ctx.gradient.view_as(ctx.gradient), x.T @ given, None, None


class Scratch(nn.Module):
    """Return outputs in the same memory each time, and gradients too."""

    def __init__(self, memory=torch.zeros):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.memory = [memory((ROWS, WIDTH), dtype=torch.float64) for _ in range(2)]

    def forward(self, x):
        output, gradient = (memory[: len(x)] for memory in self.memory)
        return _Into.apply(x, self.weight, output, gradient)


class Detached(nn.Module):
    """Return a buffer that is detached and overwritten in each forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("last", torch.zeros(0, WIDTH, dtype=torch.float64), persistent=False)

    def forward(self, x):
        y = self.linear(x)
        if len(self.last) != len(y):
            self.last = torch.zeros_like(y)
        self.last = self.last.detach().copy_(y)
        return self.last


class Aside(nn.Module):
    """Return a second tensor that each forward overwrites in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.mean = torch.zeros(1, dtype=torch.float64)

    def forward(self, x):
        self.mean.fill_(float(x.detach().mean()))
        return {"x": self.linear(x), "mean": self.mean}


class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, nest):
        return self.linear(nest["x"] * (1 + nest["mean"]))


def of_numpy(shape, dtype):
    """Return NumPy memory of which each indexing creates a new torch storage."""
    return NumpyMemory(np.zeros(shape))


class NumpyMemory:
    def __init__(self, array):
        self.array = array

    def __getitem__(self, rows):
        return torch.from_numpy(self.array[rows])


class Shaped(nn.Module):
    """Reshape each sample for an inner layer, and its output back to width 4."""

    def __init__(self, layer, *shape):
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x):
        return self.layer(x.reshape(len(x), *self.shape)).reshape(len(x), WIDTH)


class Tokens(nn.Embedding):
    """Embedding of three rows, selected by the signs of the input; no gradient for the input."""

    def forward(self, x):
        return super().forward((x[:, 0] > 0).long() + (x[:, 1] > 0)) + x.detach()


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class Recurrent(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0]


class Checkpointed(nn.Module):
    """Layer that uses `torch.utils.checkpoint` itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Thrice(nn.Module):
    """Apply one linear layer three times."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


class InPlace(nn.Linear):
    """Modify its own output in place."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x).add_(1).relu_()


class Mixed(nn.Module):
    """Multiply a tensor that requires grad by a mask that does not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        nest = {"x": self.linear(x), "mask": (x > 0).to(x.dtype), "none": None}
        return nest["x"] * nest["mask"]


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def frozen():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.requires_grad_(False)
    return layer


ORDINARY = {
    "linear": linear,
    "nothing to train": frozen,
    "conv1d": lambda: Shaped(nn.Conv1d(1, 1, 3, padding=1), 1, 4),
    "conv2d": lambda: Shaped(nn.Conv2d(1, 1, 3, padding=1), 1, 2, 2),
    "conv_transpose2d": lambda: Shaped(nn.ConvTranspose2d(1, 1, 3, padding=1), 1, 2, 2),
    "embedding": lambda: Tokens(3, WIDTH),
    "sparse embedding": lambda: Tokens(3, WIDTH, sparse=True),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "group_norm": lambda: nn.GroupNorm(2, WIDTH),
    "attention": lambda: Shaped(Attention(2, 1, batch_first=True), 2, 2),
    "recurrent": lambda: Shaped(Recurrent(2, 2, batch_first=True), 2, 2),
    "dropout": lambda: nn.Dropout(0.5),
    "three times": Thrice,
    "weight that is computed": normed,
    "in place": InPlace,
    "mask beside": Mixed,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
}

# These add a term to a gradient that does not depend on it, so results depend on the loss scale.
UNSCALED = (hook_on_its_own_linear, hook_with_a_graph, hook_with_backward)

LAYERS = {
    **ORDINARY,
    **PRODUCTS,
    **{f.__name__: partial(Pair, f) for f in SELF_DIFFERENTIATING if f not in UNSCALED},
    **STATEFUL,
    **DRAWING,
}
