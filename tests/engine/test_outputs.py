"""Layers that overwrite their last output: data already sent or kept must not change."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.engine import outputs
from gpipe_hpc.errors import ActionError
from tests.engine.catalogue import ROWS, WIDTH, Aside, Detached, Scratch, Uses, of_numpy
from tests.support import batches, cover_of, square_sum

both_transports = pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])


KINDS = {
    "scratch": lambda r: [r(Scratch, ()), r(Scratch, ())],
    "numpy": lambda r: [r(partial(Scratch, of_numpy), ()), r(partial(Scratch, of_numpy), ())],
    "detached": lambda r: [r(Detached, ()), r(Detached, ())],
    "aside": lambda r: [r(Aside, ()), r(Uses, ())],
}


def recipes(plain, kind):
    linear = plain.Recipe(nn.Linear, (WIDTH, WIDTH, True, None, torch.float64))
    return [linear, *KINDS[kind](plain.Recipe), linear]


def make(recipes, world=None, **settings):
    specs = [LayerSpec(factory, *args) for factory, args in recipes]
    return Pipeline(specs, square_sum, seed=5, world=world, microbatches=4, **settings)


def backwards(count):
    return range(count)[::-1]


LAYOUTS = {
    "gpipe": (4, {"schedule": "gpipe"}),
    "one_f_one_b": (4, {"schedule": "one_f_one_b"}),
    "zb_h1": (4, {"schedule": "zb_h1"}),
    "interleaved": (2, {"schedule": "interleaved", "schedule_options": {"stages_per_rank": 2}}),
    "alone": (1, {"schedule": "interleaved", "schedule_options": {"stages_per_rank": 4}}),
}


@cover_of("kind, layout, recompute", [*KINDS], [*LAYOUTS], ("always", "except_last", "never"))
def test_layers_that_reuse_output_memory_train_as_plain_loop(plain, kind, layout, recompute):
    """Regression: the next micro-batch overwrote the kept or sent output of the last one."""
    data, (stages, settings) = batches(2, ROWS, WIDTH), LAYOUTS[layout]
    expected = plain.train(recipes(plain, kind), square_sum, data, seed=5, microbatches=4)

    def body(world):
        pipe = make(recipes(plain, kind), world, stages=stages, recompute=recompute, **settings)
        return plain.train_rank(pipe, data)

    assert plain.unite(run_on_threads(stages, body), stages).distance(expected) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_reuse_output_memory_evaluate_and_predict(plain, kind):
    """Regression: each predicted output was that of the last micro-batch."""
    ((inputs, targets),) = batches(1, ROWS, WIDTH)

    def body(world):
        pipe = make(recipes(plain, kind)[:-1], world, stages=world.size)
        return pipe.predict(inputs), pipe.evaluate(inputs, targets).loss

    layers = plain.build(recipes(plain, kind)[:-1], 5)
    expected = []
    for piece in inputs.tensor_split(4):
        for layer in layers:
            piece = layer(piece)
        expected.append(piece.detach().clone())
    expected = torch.cat(expected)
    for size in (1, 3):
        for given, loss in run_on_threads(size, body):
            assert torch.allclose(given, expected, atol=1e-12)
            assert loss == pytest.approx(float((expected - targets).square().sum() / ROWS))


@both_transports
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_layers_that_reuse_output_memory_train_between_processes(
    plain, processes, recompute, shares_memory, tmp_path
):
    data = batches(3, ROWS, WIDTH)
    linear, scratch, *_ = recipes(plain, "scratch")
    layers = [linear, scratch, linear]
    expected = plain.train(layers, square_sum, data, seed=5, microbatches=4)

    def body(rank):
        pipe = make(
            layers,
            start_world(shares_memory=shares_memory),
            stages=2,
            partition=[2, 1],
            recompute=recompute,
        )
        return plain.train_rank(pipe, data)

    assert plain.unite(processes(2, body, tmp_path), 2).distance(expected) < 1e-11


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_outputs_of_layers_that_keep_no_alias_are_not_copied(
    plain, recompute, schedule, monkeypatch
):
    """Tanh saves its output for the backward, but autograd itself detects in-place writes to it."""
    copied = []
    original = outputs._copied

    def counting(nest, held):
        copied[-1] += len(held)
        return original(nest, held)

    monkeypatch.setattr(outputs, "_copied", counting)
    linear = plain.Recipe(nn.Linear, (WIDTH, WIDTH, True, None, torch.float64))
    layers = [linear, plain.Recipe(nn.Tanh, ()), linear, plain.Recipe(nn.Identity, ())]

    def body(world):
        pipe = make(layers, world, stages=4, recompute=recompute, schedule=schedule)
        for inputs, targets in batches(3, ROWS, WIDTH):
            if world.rank == 0:
                copied.append(0)
            world.world_group.all_gather_object("counted apart")
            pipe.step(inputs, targets)
            pipe.evaluate(inputs, targets)

    run_on_threads(4, body)
    assert copied == [0, 0, 0]


class OverwritesInput(nn.Module):
    """Modify the input of the last micro-batch in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.previous = None

    def forward(self, x):
        if self.previous is not None:
            self.previous.mul_(0.5)
        self.previous = x.detach()
        return self.linear(x)


def test_input_modified_before_its_recomputation_is_refused(plain):
    """Regression: the output was recomputed from the modified input.

    In a plain loop the backward would have ended before the modification.
    """
    linear = plain.Recipe(nn.Linear, (WIDTH, WIDTH, True, None, torch.float64))
    layers = [linear, plain.Recipe(OverwritesInput, ()), linear]

    def body(world):
        pipe = make(layers, world, stages=3, recompute="always", schedule="one_f_one_b")
        for inputs, targets in batches(2, ROWS, WIDTH):
            pipe.step(inputs, targets)

    with pytest.raises(ActionError, match=r"stage 1 \(layers 1 to 1\): the input of micro-batch"):
        run_on_threads(3, body)


class Checkpointed(nn.Module):
    """Keep the output of a torch checkpoint, which runs the inner layer again in the backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.num_calls, self.last = 0, None

    def inner(self, x):
        self.num_calls += 1
        return torch.tanh(self.linear(x))

    def forward(self, x):
        self.last = checkpoint(self.inner, x, use_reentrant=False)
        return self.last


def test_inspecting_saved_tensors_does_not_recompute_checkpoint(plain):
    """Unpacking a tensor saved by torch's checkpoint would run the layer again."""
    linear = plain.Recipe(nn.Linear, (WIDTH, WIDTH, True, None, torch.float64))
    layers = [linear, plain.Recipe(Checkpointed, ()), linear]
    data = batches(2, ROWS, WIDTH)
    expected = plain.train(layers, square_sum, data, seed=5, microbatches=4, order=backwards)

    def body(world):
        pipe = make(layers, world, stages=3, recompute="never")
        training = plain.train_rank(pipe, data)
        own = next(iter(pipe.stages[world.rank].layers.values()))
        return training, getattr(own, "num_calls", 0)

    ranks = run_on_threads(3, body)
    assert plain.unite([training for training, _ in ranks], 3).distance(expected) < 1e-12
    assert ranks[1][1] == 2 * 4 * 2


class OverwritesSaved(nn.Module):
    """Keep an alias of a tensor saved by autograd, and modify it in the next micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = None

    def forward(self, x):
        if self.last is not None:
            self.last.mul_(0.5)
        y = torch.tanh(self.linear(x))
        self.last = y.detach()
        return y


def train_overwriting(plain, recompute):
    """Train the layers; return the results, and those of a plain loop."""
    linear = plain.Recipe(nn.Linear, (WIDTH, WIDTH, True, None, torch.float64))
    layers = [linear, plain.Recipe(OverwritesSaved, ()), linear]
    data = batches(2, ROWS, WIDTH)

    def body(world):
        pipe = make(layers, world, stages=3, recompute=recompute)
        return plain.train_rank(pipe, data)

    ours = plain.unite(run_on_threads(3, body), 3)
    return ours, plain.train(layers, square_sum, data, seed=5, microbatches=4)


def test_overwriting_a_tensor_saved_by_autograd_is_refused(plain):
    """A copy of the sent output would not help, as the backward needs the saved tensor."""
    with pytest.raises(ActionError, match="modified by an inplace operation"):
        train_overwriting(plain, "never")


@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_layer_that_overwrites_its_saved_tensor_trains_with_recomputation(plain, recompute):
    """Each backward then ends before the next forward of the layer, as in a plain loop."""
    ours, expected = train_overwriting(plain, recompute)
    assert ours.distance(expected) < 1e-12
