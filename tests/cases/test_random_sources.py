"""Random numbers that are not torch's in a forward: in factories of layers, and in backwards."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.models import init_key, source_key
from tests.cases.state_support import WIDTH, assert_refused, by_ranks, linear
from tests.support import batches

SEED = 5


class FromAllSources(nn.Module):
    """Draws its weights as ported initialisers do: by torch, by NumPy and by Python."""

    def __init__(self):
        super().__init__()
        self.by_torch = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.by_numpy = nn.Parameter(torch.tensor(np.random.randn(WIDTH, WIDTH)))
        self.by_python = nn.Parameter(
            torch.tensor([random.random() for _ in range(WIDTH)]).double()
        )

    def forward(self, x):
        return torch.tanh(x @ self.by_torch @ self.by_numpy + self.by_python)


def built_weights(num_ranks, **layout):
    def body(world):
        pipe = Pipeline(
            [LayerSpec(FromAllSources) for _ in range(4)],
            nn.functional.mse_loss,
            world=world,
            seed=SEED,
            partition="uniform",
            microbatches=2,
            **layout,
        )
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    return {name: p for own in run_on_threads(num_ranks, body) for name, p in own.items()}


def expected_weights(index):
    key = init_key(SEED, index)
    torch.manual_seed(key)
    words = source_key(key, 1)
    np.random.seed([words & 0xFFFFFFFF, words >> 32])
    random.seed(source_key(key, 0))
    return dict(FromAllSources().named_parameters())


def test_weights_drawn_by_numpy_and_python_hang_on_seed_and_index_alone():
    # They were other ones in every run, and in every layout.
    want = {
        f"layers.{index}.{name}": parameter
        for index in range(4)
        for name, parameter in expected_weights(index).items()
    }
    for num_ranks, layout in ((1, {"stages": 1}), (2, {"stages": 2}), (2, {"replicas": 2})):
        random.seed(num_ranks)  # whatever the user did before
        np.random.seed(num_ranks)
        got = built_weights(num_ranks, **layout)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_building_layers_leaves_the_users_generators_alone():
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    built_weights(1, stages=1)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


class _Shake(torch.autograd.Function):
    """Mixes two branches by halves, and their gradients at random (Gastaldi, 2017)."""

    @staticmethod
    def forward(ctx, a, b, draw):
        ctx.draw = draw
        return (a + b) / 2

    @staticmethod
    def backward(ctx, gradient):
        part = ctx.draw()
        return gradient * part, gradient * (1 - part), None


class Shake(nn.Module):
    def __init__(self, source="torch", calm_steps=0):
        super().__init__()
        self.a, self.b = linear(), linear()
        self.generator = torch.Generator() if source == "own" else None
        self.source, self.num_calm = source, calm_steps

    def draw(self):
        if self.num_calm:
            self.num_calm -= 1
            return 0.5
        if self.source == "random":
            return random.random()
        if self.source == "numpy":
            return np.random.rand()
        return torch.rand((), dtype=torch.float64, generator=self.generator)

    def forward(self, x):
        return torch.tanh(_Shake.apply(self.a(x), self.b(x), self.draw))


class ShakesInTheForward(Shake):
    """Draws ahead what its backward needs: keyed, as all that a forward draws."""

    def forward(self, x):
        part = self.draw()
        return torch.tanh(_Shake.apply(self.a(x), self.b(x), lambda: part))


class Checkpointed(nn.Module):
    """Runs itself again in its backward, as transformers do; its dropout draws the same then."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(linear(), nn.Dropout(0.5))
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Noisy(nn.Module):
    """Adds noise to its gradient by a hook: of its parameter, or of its output."""

    def __init__(self, of_parameter):
        super().__init__()
        self.inner, self.of_parameter = linear(), of_parameter
        if of_parameter:
            self.inner.weight.register_hook(self.add_noise)

    @staticmethod
    def add_noise(gradient):
        return gradient + 0.01 * torch.randn_like(gradient)

    def forward(self, x):
        y = self.inner(x)
        if not self.of_parameter and y.requires_grad:
            y.register_hook(self.add_noise)
        return torch.tanh(y)


LAYOUTS = {
    "one rank": (1, {"stages": 1, "microbatches": 4}),
    "one micro-batch": (1, {"stages": 1, "microbatches": 1}),
    "never": (1, {"stages": 1, "microbatches": 4, "recompute": "never"}),
    "two stages": (2, {"stages": 2, "microbatches": 4}),
    "replicas": (2, {"stages": 1, "replicas": 2, "microbatches": 2}),
    "split": (2, {"stages": 2, "microbatches": 4, "schedule": "zb_h1"}),
    "split on one rank": (1, {"stages": 1, "microbatches": 4, "schedule": "zb_h1"}),
    "mirrored": (2, {"stages": 2, "microbatches": 4, "schedule": "chimera"}),
}
DATA = batches(2)


@pytest.mark.parametrize("source", ["torch", "random", "numpy", "own"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_draw_in_a_backward_is_refused(layout, source):
    # Two runs of one command differed, and no resumed run could go on as the first would have.
    num_ranks, keywords = LAYOUTS[layout]
    ranks = by_ranks(lambda: [Shake(source) for _ in range(4)], DATA, num_ranks, **keywords)
    whose = {
        "torch": "torch's",
        "random": "Python's",
        "numpy": "NumPy's",
        "own": "a generator that a layer holds",
    }
    assert_refused(ranks, "stage ", "micro-batch", "backward", whose[source], "save_for_backward")


@pytest.mark.parametrize("of_parameter", [True, False])
@pytest.mark.parametrize("layout", ["one rank", "two stages", "split", "split on one rank"])
def test_noise_of_hooks_is_refused(layout, of_parameter):
    num_ranks, keywords = LAYOUTS[layout]
    ranks = by_ranks(lambda: [Noisy(of_parameter) for _ in range(2)], DATA, num_ranks, **keywords)
    assert_refused(ranks, "a backward drew random numbers from torch's")


@pytest.mark.parametrize("source", ["torch", "random", "numpy"])
def test_draw_that_begins_later_is_refused_then(source):
    ranks = by_ranks(
        lambda: [Shake(source, calm_steps=4 * 5) for _ in range(2)],
        batches(8),
        1,
        stages=1,
        microbatches=4,
    )
    assert_refused(ranks, "a backward drew random numbers", steps=5)


def trained_alike(make, **keywords):
    """Return the losses of a layout after the losses of one rank."""
    found = []
    for num_ranks, layout in LAYOUTS.values():
        if layout["microbatches"] > 1:
            ranks = by_ranks(make, DATA, num_ranks, **layout, **keywords)
            assert [rank.error for rank in ranks] == [None] * num_ranks
            found.append(ranks[0].trained.losses)
    return found


@pytest.mark.parametrize("source", ["torch", "random", "numpy", "own"])
def test_draw_in_the_forward_for_the_backward_is_the_same_in_every_layout(source):
    first, *others = trained_alike(lambda: [ShakesInTheForward(source) for _ in range(4)])
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_layer_recomputes_by_itself_is_no_draw(reentrant):
    first, *others = trained_alike(
        lambda: [linear(), *(Checkpointed(reentrant) for _ in range(2)), linear()]
    )
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-10, atol=1e-10)


def test_compiled_dropout_is_no_draw():
    def make():
        return [nn.Sequential(linear(), nn.Dropout(0.5)) for _ in range(2)]

    for backend in (False, "aot_eager"):
        ranks = by_ranks(make, DATA, 1, stages=1, microbatches=2, compile=backend)
        assert ranks[0].error is None


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand], ids=["torch", "numpy"])
@pytest.mark.parametrize("pauses", [True, False])
def test_another_thread_that_draws_does_not_stop_training(draw, pauses):
    # Readers of data do so. Whether a backward draws cannot be told from it then.
    stops = threading.Event()

    def read():
        while not (stops.wait(1e-4) if pauses else stops.is_set()):
            draw(64)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ranks = by_ranks(lambda: [linear(), linear()], batches(20), 1, stages=1, microbatches=4)
    finally:
        stops.set()
        reader.join()
    assert ranks[0].error is None and len(ranks[0].trained.losses) == 20


def test_a_thread_that_waits_does_not_hide_a_draw():
    stops = threading.Event()
    waiting = threading.Thread(target=stops.wait)
    waiting.start()
    try:
        ranks = by_ranks(lambda: [Shake(), Shake()], DATA, 1, stages=1, microbatches=2)
    finally:
        stops.set()
        waiting.join()
    assert_refused(ranks, "a backward drew random numbers from torch's")
