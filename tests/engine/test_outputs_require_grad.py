"""Outputs of stages require a gradient as in the plain model, with and without recomputation."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.transport.memory import MemoryTransport
from gpipe_hpc.errors import ActionError
from tests.support import batches, cover_of

WIDTH = 4
RECOMPUTE = ["always", "except_last", "never"]


def mean_square(output, target):
    x = output["x"] if isinstance(output, dict) else output
    return (x - target).square().sum(), float(len(target))


class Enter(nn.Module):
    """Return an output, a mask, a detached copy of the output, and part of the input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return {"x": y, "mask": (x > 0).double(), "detached": y.detach() * 2, "frozen": x[:, :1]}


class ReadsRequiresGrad(nn.Module):
    """Compute different results for inputs that require a gradient and inputs that do not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, nest):
        x = self.linear(nest["x"])
        for number, name in enumerate(("mask", "detached", "frozen")):
            x = x + nest[name] * (3.0 if nest[name].requires_grad else 0.5 + number)
        return nest | {"x": x, "detached": nest["detached"] + 1}


def recipes(plain):
    return [plain.Recipe(Enter, ()), *[plain.Recipe(ReadsRequiresGrad, ())] * 3]


def pipeline(recipes, world=None, **settings):
    specs = [LayerSpec(factory, *args) for factory, args in recipes]
    return Pipeline(specs, mean_square, seed=5, world=world, **settings)


def backwards(count):
    return range(count)[::-1]


@cover_of("schedule, recompute, stages", ("gpipe", "one_f_one_b", "zb_h1"), RECOMPUTE, (4, 2))
def test_layers_see_same_requires_grad_as_in_plain_loop(plain, recompute, schedule, stages):
    """Regression: in a recomputation, every floating-point input required a gradient."""
    data = batches(2)
    expected = plain.train(recipes(plain), mean_square, data, seed=5, microbatches=4)

    def body(world):
        settings = {"recompute": recompute, "schedule": schedule, "microbatches": 4}
        pipe = pipeline(recipes(plain), world, stages=stages, **settings)
        return plain.train_rank(pipe, data)

    assert plain.unite(run_on_threads(stages, body), stages).distance(expected) < 1e-12


def test_no_gradient_is_sent_for_tensors_that_require_none(plain, monkeypatch):
    """Regression: such gradients were computed, sent and accumulated."""
    sent = []
    original = MemoryTransport.send

    def send(self, channel, lane, microbatch, nest, num_samples):
        if channel.channel.source > channel.channel.destination:
            sent.append(len(nest))
        original(self, channel, lane, microbatch, nest, num_samples)

    monkeypatch.setattr(MemoryTransport, "send", send)

    def body(world):
        pipe = pipeline(recipes(plain), world, stages=4, recompute="always", microbatches=2)
        pipe.step(*batches(1)[0])

    run_on_threads(4, body)
    assert sent == [1] * 6


class GraphRecorder(nn.Module):
    """Record which forwards build a graph, and how many of their saved tensors are alive."""

    def __init__(self, detaches=False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.detaches, self.graphs, self.saved, self.num_alive = detaches, [], [], []

    def forward(self, x):
        self.num_alive.append(sum(reference() is not None for reference in self.saved))
        self.graphs.append(torch.is_grad_enabled())
        y = torch.tanh(self.linear(x))  # saved by autograd
        self.saved.append(weakref.ref(y.untyped_storage()))
        y = y * 2.0
        return y.detach() if self.detaches else y


def test_only_first_forward_builds_a_graph_and_releases_it():
    layer = GraphRecorder()

    def body(world):
        pipe = Pipeline(
            [layer, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)],
            mean_square,
            microbatches=4,
            recompute="always",
            world=world,
        )
        for inputs, targets in batches(2):
            pipe.step(inputs, targets)

    run_on_threads(2, body)
    rest = [False] * 3 + [True] * 4
    assert layer.graphs == [True, *rest, False, *rest]
    # Each forward and recomputation finds no saved tensor of another one alive.
    assert layer.num_alive == [0] * 16


@pytest.mark.parametrize("begins", [True, False])
def test_layer_may_start_or_stop_detaching_between_steps(plain, begins):
    """The layer detaches depending on an attribute of which the pipeline is not notified."""
    data = batches(2)

    def train(layers, recompute, world):
        pipe = Pipeline(layers, mean_square, microbatches=3, recompute=recompute, world=world)
        before = plain.train_rank(pipe, data[:1])
        layers[0][1].detaches = not begins
        after = plain.train_rank(pipe, data[1:])
        both = enumerate((before, after))
        return {f"{name} {i}": g for i, t in both for name, g in t.gradients[0].items()}

    gradients = []
    for recompute in RECOMPUTE:
        torch.manual_seed(1)
        linears = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
        layers = [nn.Sequential(linears[0], GraphRecorder(begins)), linears[1]]
        first, second = run_on_threads(2, partial(train, layers, recompute))
        gradients.append(first | second)
    step_without = 0 if begins else 1
    for found in gradients:
        assert found.keys() == gradients[2].keys()
        for name, gradient in gradients[2].items():
            is_none = name.startswith("layers.0") and name.endswith(str(step_without))
            assert (gradient is None) == (found[name] is None) == is_none, name
            assert is_none or torch.equal(found[name], gradient), name


class NearIdentity(nn.Linear):
    """Linear layer near the identity, so that the sign of a micro-batch's mean is kept."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.weight.copy_(torch.eye(WIDTH) + 0.01 * self.weight)


class ByValue(nn.Module):
    """Detach micro-batches with a negative mean, like an expert that receives no token."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        y = self.linear(x)
        return {"x": x * 1.0, "more": y if x.mean() > 0 else y.detach()}


class Joins(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, nest):
        return self.linear(nest["x"]) + nest["more"] * nest["more"]


@pytest.mark.parametrize("signs", ["+-+-", "-+-+", "++--", "--++"])
def test_requires_grad_that_depends_on_values_trains_as_plain_loop(plain, signs, caplog):
    recipe = [plain.Recipe(NearIdentity, ()), plain.Recipe(ByValue, ()), plain.Recipe(Joins, ())]
    inputs = torch.cat([torch.full((2, WIDTH), 9.0 if s == "+" else -9.0) for s in signs]).double()
    data = [(inputs, batches(1)[0][1])] * 2
    expected = plain.train(recipe, mean_square, data, seed=5, microbatches=4, order=backwards)

    def body(world):
        pipe = pipeline(
            recipe, world, stages=2, partition=[2, 1], recompute="always", microbatches=4
        )
        return plain.train_rank(pipe, data)

    trained = plain.unite(run_on_threads(2, body), 2)
    assert trained.distance(expected) < 1e-12
    warnings = [
        record.message for record in caplog.records if "for some micro-batches" in record.message
    ]
    # Only a flag that was True in the first forward can turn out to be wrong.
    assert len(warnings) == (signs[0] == "+")
    assert all("layers.1 (ByValue)" in text for text in warnings)


class Fickle(nn.Module):
    """Detach the output in every second call, starting with the first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        y = self.linear(x)
        return y.detach() if self.num_calls % 2 else y


def test_requires_grad_in_recomputation_only_is_refused():
    """Otherwise the gradient would be lost, because the forward's output did not require one."""
    layers = [Fickle(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]

    def body(world):
        pipe = Pipeline(layers, mean_square, recompute="always", world=world)
        pipe.step(*batches(1)[0])

    with pytest.raises(ActionError, match=r"layers\.0 \(Fickle\).*requires a gradient in the rec"):
        run_on_threads(2, body)
