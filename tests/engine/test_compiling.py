"""Compiled layers give the results of uncompiled ones in every layout.

Fast tests use torch's `aot_eager`, which traces forward and backward but generates no machine
code.
"""

import copy

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.assembly import chosen_backend, compile_layers
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import LayerSpec, add_loss
from tests.support import buffers_of

CPU = HostDevice()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.relu(self.inner(self.norm(x))))


class Noisy(nn.Module):
    """Report a loss, stash a tensor, draw random numbers and work in place."""

    def forward(self, x):
        add_loss("size", x.square().sum() * 1e-2)
        y = nn.functional.dropout(x, 0.2)
        return y.mul_(2.0), x + 1


class Joined(nn.Module):
    def forward(self, x, kept):
        return x + kept


MODEL = [
    LayerSpec(nn.Linear, 6, 8),
    LayerSpec(Block, 8),
    LayerSpec(Noisy).stashing("kept"),
    LayerSpec(Block, 8),
    LayerSpec(nn.BatchNorm1d, 8),
    LayerSpec(Joined).popping("kept"),
    LayerSpec(Block, 8),
    LayerSpec(nn.Linear, 8, 3),
]


def loss_fn(output, target):
    return (output - target).float().square().sum(), float(len(target))


def batches(samples):
    """Return batches of these sizes, for which BatchNorm of two samples is well-conditioned."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(s, 6, generator=generator), torch.randn(s, 3, generator=generator))
        for s in samples
    ]


def train(compile, *, layers=MODEL, ranks=2, samples=(8, 11, 7), **options):
    """Train; return losses and gradients of each step, the buffers and an evaluation loss."""

    def body(world):
        pipe = Pipeline(
            copy.deepcopy(layers), loss_fn, stages=ranks, compile=compile, world=world, **options
        )
        seen = []
        for inputs, targets in batches(samples):
            part = pipe.share(len(inputs))
            losses = pipe.step(inputs[part], targets[part]).losses
            gradients = {n: p.grad.clone() for n, p in pipe.named_parameters()}
            seen.append((losses, gradients))
        inputs, targets = batches(samples)[0]
        part = pipe.share(len(inputs))
        evaluated = pipe.evaluate(inputs[part], targets[part]).loss
        return seen, buffers_of(pipe), evaluated

    return run_on_threads(ranks * options.get("replicas", 1), body)


def assert_near(ours, expected, rtol=1e-5, atol=1e-6):
    for (steps, buffers, loss), (plain_steps, plain_buffers, plain_loss) in zip(
        ours, expected, strict=True
    ):
        for (losses, gradients), (plain_losses, plain_gradients) in zip(
            steps, plain_steps, strict=True
        ):
            assert losses == pytest.approx(plain_losses, rel=rtol)
            assert gradients.keys() == plain_gradients.keys()
            for name, gradient in gradients.items():
                assert torch.allclose(gradient, plain_gradients[name], rtol, atol), name
        assert buffers.keys() == plain_buffers.keys()
        for name, buffer in buffers.items():
            assert torch.allclose(buffer, plain_buffers[name], rtol, atol), name
        assert loss == pytest.approx(plain_loss, rel=rtol)


OPTIONS = [
    {"microbatches": 3, "recompute": "always", "schedule": "zb_h1"},
    *(
        pytest.param(options, marks=mark)
        for options, mark in (
            (
                {"microbatches": 2, "replicas": 2, "normalise_over_replicas": True},
                pytest.mark.long,
            ),
            (
                {"microbatches": 3, "recompute": "always", "precision": "bfloat16"},
                pytest.mark.slow,
            ),
        )
    ),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_compiled_training_equals_uncompiled(options):
    near = (2e-2, 2e-2) if "precision" in options else (1e-5, 1e-6)
    assert_near(train("aot_eager", **options), train(False, **options), *near)


@pytest.mark.product
def test_training_compiled_to_machine_code_equals_uncompiled():
    options = {"microbatches": 3, "recompute": "always"}
    assert_near(train(True, **options), train(False, **options), 1e-4, 1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_dropout_masks_equal_uncompiled_with_and_without_grad(backend):
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3))
    call = compile_layers({0: layer}, backend)[0]
    value = torch.randn(64, 8)

    def run(each, graph):
        torch.default_generator.manual_seed(5)
        with torch.set_grad_enabled(graph):
            return each(value).detach()

    expected = run(layer, True)
    for graph in (False, True, False):
        assert torch.equal(run(call, graph) == 0, expected == 0)
        assert torch.allclose(run(call, graph), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_number_of_compiled_graphs_is_bounded():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    same = {i: nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for i in range(12)}
    others = {12 + i: nn.Sequential(nn.Linear(8 + i, 9 + i), nn.ReLU()) for i in range(4)}
    calls = compile_layers(same | others, "eager")

    def num_graphs(sizes):
        for size in sizes:
            for graph in (True, False):
                value = torch.zeros(size, 8)
                with torch.set_grad_enabled(graph):
                    for call in calls.values():
                        value = call(value)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    first = num_graphs([4, 5])
    # Five kinds of layers, with and without gradients, with fixed and with dynamic sizes, and two
    # for the inputs of the first layer.
    assert first <= 5 * 2 * 2 + 2
    assert num_graphs([6, 7, 8, 9, 30]) == first


def test_stages_of_one_rank_share_compiled_graphs():
    """Regression: each stage compiled its own graphs; virtual stages took 13 % longer on a GPU."""

    def num_graphs(**options):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]

        def body(world):
            plain = {"compile": "eager", "recompute": "never", "microbatches": 2}
            pipe = Pipeline(layers, loss_fn, world=world, **plain, **options)
            pipe.step(torch.zeros(4, 4), torch.zeros(4, 4))

        run_on_threads(1, body)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    virtual = {"schedule": "looped_bfs", "schedule_options": {"stages_per_rank": 4}}
    # Two, since the input of the first layer requires no gradient.
    assert num_graphs(**virtual) == num_graphs() == 2


def test_compiling_keeps_parameter_names_and_module_types():
    def body(world):
        pipe = Pipeline(copy.deepcopy(MODEL), loss_fn, compile="eager", world=world)
        return [n for n, _ in pipe.named_parameters()], [
            type(layer) for s in pipe.stages.values() for layer in s.layers.values()
        ]

    ((names, kinds),) = run_on_threads(1, body)
    assert names[:3] == ["layers.0.weight", "layers.0.bias", "layers.1.norm.weight"]
    assert kinds[1] is Block


def test_unknown_backend_or_missing_compiler_raises_error(monkeypatch):
    assert chosen_backend(False, CPU) is None
    with pytest.raises(ConfigError, match=r"compile: unknown backend, .*inductor.* got 'fast'"):
        chosen_backend("fast", CPU)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler found \(searched for g\+\+"):
        chosen_backend(True, CPU)
    assert chosen_backend("aot_eager", CPU) == "aot_eager"


def test_schedule_with_split_backward_logs_warning(caplog):
    layers = [LayerSpec(nn.Linear, 6, 4), LayerSpec(nn.Linear, 4, 3)]
    with caplog.at_level("WARNING", logger="gpipe_hpc"):
        train("eager", layers=layers, schedule="zb_h1", microbatches=2, samples=(4,))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "W of schedule 'zb_h1' does nothing" in messages[0]
