"""Split backward: memory kept until W, and unusual layers and losses."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.errors import ActionError
from tests.support import mean_square, resident_bytes

MIDDLE = StageRoutes({-1: ()}, {1: ()})


class Apply(nn.Module):
    """Turn a function of (layer, input) into a layer with submodules."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.function(self, x)


RUN = Run("test", lambda microbatch: lambda layer: 17, 1)


def runner_of(layer):
    work = StageRunner(Stage(0, {0: layer}, HostDevice(), MIDDLE))
    work.stage.gradients.clear()
    return work


def gradients(layer, *, splits, keep=RunMode.TRAIN):
    """Return for each parameter whether it has no gradient before W, and all gradients after W."""
    work = runner_of(layer)
    boundary = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
    (output,) = work.forward(RUN, 0, [boundary], 5, ForwardPlan(keep, splits), Outcome())
    if keep is RunMode.RECORD:
        work.recompute(RUN, 0)
    work.backward(0, [torch.ones_like(output)])
    early = [p.grad is None for p in layer.parameters()]
    if splits:
        work.weights(0)
    return early, [boundary.grad, *(p.grad.clone() for p in layer.parameters())]


def waits_for_w(layer):
    """Return for each parameter whether W computes its gradient; assert gradients equal to B's."""
    _, whole = gradients(layer, splits=False)
    waits, split = gradients(layer, splits=True)
    assert all(map(torch.equal, whole, split))
    assert all(gradient.any() for gradient in split)
    return waits


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_part_of_a_layer_is_not_split(reentrant):
    """The part that torch recomputes in the backward is not split; the layer after it is."""
    inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    layer = Apply(
        lambda s, x: s.last(checkpoint(s.inner, x, use_reentrant=reentrant)),
        inner=inner,
        last=nn.Linear(4, 4),
    )
    assert waits_for_w(layer) == [False] * 4 + [True] * 2


def mapped(layer, x):
    return torch.func.vmap(lambda row: torch.tanh(layer.linear(row)))(x)


def slopes(layer, x):
    return torch.func.vmap(torch.func.grad(lambda row: layer.linear(row).exp().sum()))(x)


@pytest.mark.parametrize("function", [mapped, slopes])
def test_functorch_transforms_are_not_split(function):
    assert waits_for_w(Apply(function, linear=nn.Linear(4, 3))) == [False, False]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("keep", [RunMode.TRAIN, RunMode.RECORD])
def test_layer_may_differentiate_in_its_forward(create_graph, keep):
    """Regression: such a layer silently got wrong weight gradients, and later raised an error."""

    def slope(layer, x):
        how = {"create_graph": create_graph, "retain_graph": True}
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = torch.tanh(layer.linear(x)).sum()
            return y + torch.autograd.grad(y, x, **how)[0]

    layer = Apply(slope, linear=nn.Linear(4, 3))
    _, whole = gradients(layer, splits=False, keep=keep)
    waits, split = gradients(layer, splits=True, keep=keep)
    torch.testing.assert_close(split, whole)
    assert all(waits) is not create_graph


def test_error_of_backward_in_forward_names_the_action():
    def body(world):
        def descend(layer, x):
            y = layer.linear(x)
            y.sum().backward(retain_graph=True)
            return y

        layer = Apply(descend, linear=nn.Linear(4, 4))
        settings = {"microbatches": 2, "schedule": "zb_h1", "recompute": "never"}
        pipe = Pipeline([nn.Linear(4, 4), layer], mean_square, world=world, **settings)
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))

    with pytest.raises(ActionError, match=r"stage 1, micro-batch 0, action 1F0.*in its forward"):
        run_on_threads(2, body)


@pytest.mark.parametrize("create_graph", [False, True])
def test_loss_may_differentiate_layers(create_graph):
    """Regression: gradients that the loss requested were also left to W, and then refused."""

    class Pair(nn.Linear):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return super().forward(x), x

    def loss(output, target):
        y, x = output
        how = {"create_graph": create_graph, "retain_graph": True}
        slope = torch.autograd.grad(y.square().sum(), x, **how)[0]
        return (y - target).square().mean() + slope.square().mean()

    layers = [nn.Linear(4, 4), Pair(4, 4)]
    inputs, targets = torch.randn(2, 4, 4)

    def body(world):
        settings = {"microbatches": 2, "recompute": "never", "world": world}
        pipe = Pipeline(copy.deepcopy(layers), loss, schedule="zb_h1", **settings)
        pipe.step(inputs, targets)
        return {name: p.grad for name, p in pipe.named_parameters()}

    _, found = run_on_threads(2, body)
    loss(layers[1](layers[0](inputs)), targets).backward()
    expected = {f"layers.1.{name}": p.grad for name, p in layers[1].named_parameters()}
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_layers_have_gradients_of_eager_layers(backend):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4))
    _, expected = gradients(inner, splits=False)
    compiled = torch.compile(inner, backend=backend, fullgraph=True)
    waits_for_w(compiled)
    assert all(map(torch.equal, expected, gradients(compiled, splits=True)[1]))


class Saved:
    """A tensor saved by autograd."""

    def __init__(self, tensor, census):
        self.tensor = tensor
        census[self] = tensor.nbytes


def test_i_releases_all_but_inputs_of_w_and_w_releases_the_rest():
    layer = nn.Sequential(
        nn.Linear(4, 32, bias=False), nn.Tanh(), nn.Sigmoid(), nn.Linear(32, 8, bias=False)
    )
    made, census = [], weakref.WeakKeyDictionary()
    for module in layer:
        module.register_forward_hook(
            lambda module, args, output: made.append(weakref.ref(output.untyped_storage()))
        )

    def alive():
        return [ref() is not None for ref in made], sum(census.values())

    work, boundary = runner_of(layer), torch.randn(16, 4, requires_grad=True)
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Saved(tensor, census), lambda saved: saved.tensor
        ):
            (output,) = work.forward(
                RUN, 0, [boundary], 16, ForwardPlan(RunMode.TRAIN, splits=True), Outcome()
            )
        gradient = torch.randn_like(output)
        del output, boundary
        # The linear layers keep their inputs, tanh and sigmoid their outputs.
        assert alive() == ([False, True, True, False], 4 * 16 * (4 + 32 + 32 + 32))
        work.backward(0, [gradient])
        assert alive() == ([False, False, True, False], 4 * 16 * (4 + 32))
        work.weights(0)
        assert alive() == ([False] * 4, 0)
    finally:
        gc.enable()


def test_split_steps_without_garbage_collector_do_not_leak_memory():
    """A step keeps 2 MB until W; a leak through a reference cycle would add 100 MB."""
    layer = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))
    measured = []
    gc.collect()
    gc.disable()
    try:
        for step in range(71):
            work, boundary = runner_of(layer), torch.randn(512, 256, requires_grad=True)
            (output,) = work.forward(
                RUN, 0, [boundary], 512, ForwardPlan(RunMode.TRAIN, splits=True), Outcome()
            )
            work.backward(0, [torch.ones_like(output)])
            work.weights(0)
            if step in (20, 70):
                measured.append((len(gc.get_objects()), resident_bytes()))
    finally:
        gc.enable()
    assert measured[1][0] - measured[0][0] < 25
    assert measured[1][1] - measured[0][1] < 20e6


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def test_timeline_shows_w_only_for_stages_that_are_split():
    """A linear layer can be split. torch's attention cannot, so its stage has no W."""

    def body(world):
        layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Attention, 4, 2, batch_first=True)]
        pipe = Pipeline(
            layers, mean_square, microbatches=4, schedule="zb_h1", recompute="never", world=world
        )
        for size in (7, 3):
            pipe.step(torch.randn(size, 3, 4), torch.randn(size, 3, 4))
        return pipe.timeline()

    rows = run_on_threads(2, body)[0].events
    counts = [[sum(e.action.op == op for e in row) for op in "FIW"] for row in rows]
    assert counts == [[3, 3, 3], [3, 3, 0]]  # the fourth micro-batch is empty
