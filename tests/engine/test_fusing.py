"""Linear layers that add to `.grad` within the product: the same gradients, and no less care."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.comm.group import SoloGroup
from gpipe_hpc.engine import fusing
from gpipe_hpc.engine.routes import Edge, StageRoutes
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.work import Keep, Recipe, StageWork
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import build_model, token_cross_entropy

MIDDLE = StageRoutes((Edge(-1),), (Edge(1),))
SIZES = {"vocab_size": 13, "block_size": 5, "num_layers": 5, "num_heads": 2, "width": 8}
TOKENS = torch.randint(13, (11, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _every_weight_is_large(monkeypatch):
    for splits in (True, False):
        monkeypatch.setitem(fusing.SMALLEST_WEIGHT, splits, 1)


@pytest.fixture
def calls(monkeypatch):
    """Count the linear layers that are fused."""
    seen = []
    accumulate = fusing.LinearCall.accumulate

    def counted(call, gradient):
        seen.append(call)
        accumulate(call, gradient)

    monkeypatch.setattr(fusing.LinearCall, "accumulate", counted)
    return seen


class Nobody:
    """Take no notice of what layers report."""

    def note(self, part, noted):
        return []


def key(layer):
    return 17


def make_work(layer, *, fuses=True):
    stage = Stage(0, {0: layer}, torch.device("cpu"), MIDDLE)
    if fuses:
        stage.fuse_accumulation()
    stage.gradients.clear(SoloGroup(0))
    return StageWork(stage, Nobody())


def run_layer(layer, boundary, *, splits=False, fuses=True, recomputes=False, num_steps=3):
    """Run micro-batches through a layer; return the input's gradient and the parameters'."""
    work = make_work(layer, fuses=fuses)
    recipe = Recipe(Keep.INPUT if recomputes else Keep.GRAPH, splits)
    for number in range(num_steps):
        given = boundary.detach().requires_grad_(boundary.is_floating_point())
        (output,) = work.forward(number, [given], 2, key, recipe)
        if recomputes:
            work.recompute(number, key)
        ramp = torch.linspace(0.1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        (back,) = work.backward(number, [ramp])
        if splits:
            work.weights(number)
    assert work.num_kept == 0
    return back, [p.grad for p in layer.parameters()], work.stage.gradients.buckets


class Apply(nn.Module):
    """Turn a function of (layer, input) into a layer that has a linear one."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def frozen(layer, name):
    layer.get_parameter(name).requires_grad_(False)
    return layer


LINEAR = {
    "one": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "frozen bias": lambda: frozen(nn.Linear(4, 3), "bias"),
    "used twice": lambda: Apply(lambda s, x: s.linear(torch.tanh(s.linear(x)))),
    "in place behind": lambda: Apply(lambda s, x: F.relu_(s.linear(x))),
    "beside an embedding": lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)),
    "weight as matrix too": lambda: Apply(lambda s, x: s.linear(x) @ s.linear.weight),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4)], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_are_those_of_autograd(name, shape, splits, recomputes, calls):
    boundary = torch.randn(shape, dtype=torch.float64)
    if name == "beside an embedding":
        boundary = torch.randint(0, 9, shape)
    found = []
    for fuses in (False, True):
        torch.manual_seed(0)
        layer = LINEAR[name]().double()
        how = {"splits": splits, "fuses": fuses, "recomputes": recomputes}
        found.append(run_layer(layer, boundary, **how))
    assert len(calls) == (6 if name == "used twice" else 3)
    for left, right in zip(*(each[:2] for each in found), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)
    for bucket in found[1][2]:
        assert all(bucket.used()) and len(bucket.parameters) == len(list(bucket.used()))


@pytest.mark.parametrize("splits", [False, True])
def test_many_rows_differ_in_the_last_bits_alone(splits, calls):
    boundary = torch.randn(3000, 4)
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    _, plain, _ = run_layer(layer, boundary, fuses=False)
    plain = [gradient.clone() for gradient in plain]
    _, fused, _ = run_layer(layer, boundary, splits=splits)
    assert calls
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "layer",
    [frozen(nn.Linear(4, 3), "weight"), nn.Linear(4, 3, dtype=torch.complex64)],
    ids=["frozen weight", "complex"],
)
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_what_is_not_fused_is_left_to_autograd(layer, calls):
    boundary = torch.randn(5, 4).to(layer.weight.dtype)
    run_layer(layer, boundary)
    assert not calls and layer.bias.grad.any()


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kind", ["sparse", "nested"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_inputs_without_rows_are_left_to_autograd(kind, splits, calls):
    def made(layer, x):
        if kind == "sparse":
            return layer.linear(x.detach().to_sparse())
        parts = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        return layer.linear(parts).values()

    layer = Apply(made)
    run_layer(layer, torch.randn(5, 4), splits=splits)
    assert not calls and layer.linear.weight.grad.any()


@pytest.mark.parametrize("splits", [False, True])
def test_small_weights_are_not_fused(monkeypatch, calls, splits):
    monkeypatch.setitem(fusing.SMALLEST_WEIGHT, splits, 13)
    run_layer(nn.Linear(4, 3), torch.randn(5, 4), splits=splits)
    assert not calls
    run_layer(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)), torch.randn(5, 4), splits=splits)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_called(name, way, calls):
    layer, seen = nn.Linear(4, 3), []
    getattr(layer.get_parameter(name), way)(lambda tensor: seen.append(tensor) and None)
    run_layer(layer, torch.randn(5, 4))
    assert len(seen) == 3 and not calls


def test_autocast_is_left_to_autograd(calls):
    layer = nn.Linear(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        run_layer(layer, torch.randn(5, 4))
    assert not calls and layer.weight.grad.any()


def with_noise(layer, x):
    """Run with other weights for a moment, as weight noise and binarised nets do."""
    kept = layer.linear.weight.data
    layer.linear.weight.data = kept + 1
    y = layer.linear(x)
    layer.linear.weight.data = kept
    return y


def with_wide_bias(layer, x):
    return F.linear(x, layer.linear.weight, layer.bias)


class Wide(Apply):
    def __init__(self):
        super().__init__(with_wide_bias)
        self.bias = nn.Parameter(torch.randn(5, 4))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class InFloat32(Apply):
    """Leaves the autocast of whoever calls it."""

    def __init__(self):
        super().__init__(lambda s, x: s.linear(x))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Apply(with_noise),
        Wide,
        lambda: Apply(lambda s, x: s.linear(x) + _Nothing.apply(s.linear(x))),
    ],
    ids=["weights swapped", "wide bias", "no gradient behind one call"],
)
def test_what_models_do_with_linear_layers(make, splits):
    boundary = torch.randn(5, 4)
    found = []
    for fuses in (False, True):
        torch.manual_seed(0)
        found.append(run_layer(make(), boundary, splits=splits, fuses=fuses)[:2])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [False, True])
def test_nothing_behind_a_layer_leaves_its_parameters_unused(splits):
    layer = Apply(lambda s, x: x + _Nothing.apply(s.linear(x)))
    *_, buckets = run_layer(layer, torch.randn(5, 4), splits=splits)
    assert buckets[0].used() == [False, False]


@pytest.mark.parametrize("splits", [False, True])
def test_a_layer_that_leaves_autocast_is_not_cast_in_its_backward(splits, calls):
    boundary = torch.randn(5, 4)
    found = []
    for is_around in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_around):
            found.append(run_layer(InFloat32(), boundary, splits=splits)[:2])
    assert len(calls) == 6
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_asking_for_it_leaves_parametrizations_alone():
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    make_work(layer)
    assert before and all(torch.equal(before[n], b) for n, b in layer.named_buffers())


def test_weights_may_be_clamped_where_the_input_needs_no_gradient(calls):
    def clamped(layer, x):
        with torch.no_grad():
            layer.linear.weight.clamp_(-1, 1)
        return layer.linear(x)

    work = make_work(Apply(clamped))
    for number in range(2):
        (output,) = work.forward(number, [torch.randn(5, 4)], 5, key, Recipe(Keep.GRAPH, False))
    for number in range(2):
        work.backward(number, [torch.ones_like(output)])
    assert len(calls) == 2


def test_a_call_that_is_differentiated_twice_is_refused():
    call = fusing.LinearCall(
        torch.randn(5, 4), nn.Parameter(torch.randn(3, 4)), None, fusing.LinearCall.accumulate
    )
    call.leave(torch.ones(5, 3))
    with pytest.raises(ModelError, match="ran twice"):
        call.leave(torch.ones(5, 3))


def write_into_input(layer, x):
    given = x * 1
    y = layer.linear(given)
    given.add_(1)
    return y


@pytest.mark.parametrize("splits", [False, True])
def test_an_input_that_was_overwritten_is_refused(splits):
    with pytest.raises(ModelError, match="modified in place between"):
        run_layer(Apply(write_into_input), torch.randn(5, 4), splits=splits)


@pytest.mark.parametrize("splits", [False, True])
def test_nothing_stays_behind_without_the_collector(splits, monkeypatch):
    refs = []
    accumulate = fusing.LinearCall.accumulate

    def noted(call, gradient):
        refs.extend((weakref.ref(call.input), weakref.ref(gradient)))
        accumulate(call, gradient)

    monkeypatch.setattr(fusing.LinearCall, "accumulate", noted)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    gc.collect()
    gc.disable()
    try:
        run_layer(layer, torch.randn(5, 4), splits=splits)
        assert len(refs) == 12 and not any(ref() is not None for ref in refs)
    finally:
        gc.enable()


def trained(world, *, tied=False, **settings):
    layers = build_model("gpt", **SIZES, dropout=0.1, tied=tied)
    pipe = Pipeline(
        layers, token_cross_entropy, seed=4, partition="uniform", world=world, **settings
    )
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    part = pipe.share(len(inputs))
    losses = [pipe.step(inputs[part], targets[part]).loss for _ in range(2)]
    return losses, {name: p.grad.clone() for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("stages", [1, 2])
def test_tied_weights(stages, calls):
    settings = {"stages": stages, "microbatches": 4, "tied": True}
    plain, fused = (
        run_on_threads(stages, partial(trained, fuse_accumulation=fuses, **settings))
        for fuses in (False, True)
    )
    assert calls
    for left, right in zip(plain, fused, strict=True):
        torch.testing.assert_close(left[1], right[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb_h1", "zb_v", "chimera"])
def test_pipelines_train_to_the_same_gradients(schedule, replicas, recompute, calls):
    settings = {
        "schedule": schedule,
        "stages": 2,
        "replicas": replicas,
        "microbatches": 4,
        "recompute": recompute,
    }
    plain, fused = (
        run_on_threads(2 * replicas, partial(trained, fuse_accumulation=fuses, **settings))
        for fuses in (False, True)
    )
    assert calls
    for left, right in zip(plain, fused, strict=True):
        assert left[0] == right[0]
        torch.testing.assert_close(left[1], right[1], rtol=1e-5, atol=1e-7)


def test_activations_may_wait_on_the_host(calls):
    settings = {"stages": 2, "microbatches": 4, "offload": True, "recompute": "never"}
    plain, fused = (
        run_on_threads(2, partial(trained, fuse_accumulation=fuses, **settings))
        for fuses in (False, True)
    )
    assert calls
    for left, right in zip(plain, fused, strict=True):
        torch.testing.assert_close(left[1], right[1], rtol=1e-5, atol=1e-7)
