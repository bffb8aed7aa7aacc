"""Properties of training, evaluation and resuming that hold for each layer of the catalogue."""

import copy

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from tests.engine.catalogue import DRAWING, LAYERS, STATEFUL, WIDTH, seed_all
from tests.support import (
    Trained,
    assert_close,
    batches,
    buffers_of,
    descend,
    gradients_of,
    in_turn,
    square_sum,
    together,
    train_ranks,
)

SIZES = {"microbatches": 4}
SAMPLES, MICROBATCHES, STEPS, RATE, SEED = 11, 4, 3, 0.1, 5
BATCHES = batches(STEPS, SAMPLES, WIDTH, 2)


def model(name):
    """Return a model with three layers of a kind: one between others and two in a row."""
    torch.manual_seed(3)
    kinds = [LAYERS[name]().double() for _ in range(3)]
    first, last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2).double()
    return [first, kinds[0], nn.Tanh(), kinds[1], kinds[2], last]


def train_plain(plain, layers):
    """Train with a plain loop over micro-batches, seeded by the published formula."""
    layers = nn.ModuleList(copy.deepcopy(layers))
    trained = Trained()
    for step, (inputs, targets) in enumerate(BATCHES):
        layers.zero_grad()
        trained.losses.append(0.0)
        pieces = (each.tensor_split(MICROBATCHES) for each in (inputs, targets))
        for m, (x, y) in enumerate(zip(*pieces, strict=True)):
            x = x.clone()
            for index, layer in enumerate(layers):
                seed_all(plain, plain.key(2, SEED, step, m, index), layer)
                x = layer(x)
            total, _ = square_sum(x, y)
            (total / SAMPLES).backward()
            trained.losses[-1] += total.item() / SAMPLES
        trained.gradients.append(
            {
                f"layers.{n}": p.grad.clone()
                for n, p in layers.named_parameters()
                if p.grad is not None
            }
        )
        descend(layers.parameters(), RATE)
    trained.buffers = {f"layers.{n}": b for n, b in layers.named_buffers()}
    return trained


LAYOUTS = [
    (2, {"schedule": "gpipe", "recompute": "always"}),
    (2, {"schedule": "zb_h1", "recompute": "never"}),
    (2, {"schedule": "one_f_one_b", "recompute": "except_last"}),
    (1, {"schedule": "gpipe", "recompute": "never", "offload": True}),
    (2, {"schedule": "zb_v", "recompute": "always"}),
    (3, {"schedule": "gpipe", "recompute": "never"}),
    (2, {"schedule": "one_f_one_b", "recompute": "always"}),
    (2, {"schedule": "gpipe", "recompute": "except_last"}),
    (2, {"schedule": "interleaved", "recompute": "except_last"}),
    (2, {"schedule": "zb_h1", "recompute": "always"}),
    (1, {"schedule": "gpipe", "recompute": "always", "offload": True}),
    (2, {"schedule": "zb_v", "recompute": "never"}),
]


@in_turn("name, layout", [*LAYERS], LAYOUTS, each=2, more=2)
def test_training_equals_plain_loop(plain, name, layout):
    """Regression: recomputation updated running averages a second time."""
    ranks, options = layout
    layers = model(name)
    found = train_ranks(
        layers, square_sum, BATCHES, ranks=ranks, rate=RATE, seed=SEED, **SIZES, **options
    )
    assert_close(together(found), train_plain(plain, layers), 1e-10)


CHANGING = STATEFUL.keys() | DRAWING.keys()  # layers whose output differs between calls


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_and_prediction_agree_and_keep_buffers(name):
    """Buffers may change only if the layer itself changes them."""
    layers = model(name)
    inputs, targets = BATCHES[0]

    def body(world):
        pipe = Pipeline(copy.deepcopy(layers), square_sum, seed=SEED, world=world, **SIZES)
        before = {n: b.clone() for n, b in buffers_of(pipe).items()}
        loss = pipe.evaluate(inputs, targets).loss
        return loss, pipe.predict(inputs), before, buffers_of(pipe)

    for loss, predicted, before, after in run_on_threads(2, body):
        total = square_sum(predicted, targets)[0].item() / SAMPLES
        assert name in CHANGING or loss == pytest.approx(total, rel=1e-10)
        for n, buffer in before.items():
            assert name in STATEFUL or torch.equal(after[n], buffer), n


# A lazy layer registers a buffer in its first forward, so a new model lacks it when it loads.
NOT_LAZY = [name for name in LAYERS if name != "lazy"]
# Layers that iterate until a tolerance is reached, so that rounding affects the result.
ITERATED = ("equilibrium", "regularised_equilibrium")


@pytest.mark.parametrize("name", NOT_LAZY)
def test_resumed_run_equals_uninterrupted_run(name, tmp_path):

    def body(world):
        def make():
            return Pipeline(copy.deepcopy(layers), square_sum, seed=SEED, world=world, **SIZES)

        whole = make()
        whole.step(*BATCHES[0])
        whole.save(tmp_path / "saved")
        result = whole.step(*BATCHES[1])
        resumed = make()
        resumed.load(tmp_path / "saved")
        again = resumed.step(*BATCHES[1])
        return result.loss, again.loss, gradients_of(whole), gradients_of(resumed)

    layers = model(name)
    for loss, again, gradients, same in run_on_threads(2, body):
        assert loss == again
        assert gradients.keys() == same.keys()
        for n, gradient in gradients.items():
            near = 1e-10 if name in ITERATED else 0.0
            assert torch.allclose(gradient.to_dense(), same[n].to_dense(), near, near), n
