"""Random numbers of layers from Python, NumPy and own generators are seeded like torch's.

The plain loop derives the seeds itself, from the formula in the docstring of models/randomness.py.
"""

import copy
import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ActionError
from gpipe_hpc.planner.costs.measured import measure_layers
from tests.engine.catalogue import Draw, FromAll, FromNumpy, FromPython, seed_all
from tests.support import (
    Trained,
    batches,
    square_sum,
    together,
    train_ranks,
)

WIDTH, SAMPLES, MICROBATCHES, STEPS, SEED = 4, 8, 4, 3, 5
OTHER_THREAD = ThreadPoolExecutor(1)


BATCHES = batches(STEPS, SAMPLES, WIDTH)


def train_plain(plain, layers):
    layers = copy.deepcopy(layers)
    trained = Trained()
    for step, (inputs, targets) in enumerate(BATCHES):
        nn.ModuleList(layers).zero_grad()
        trained.losses.append(0.0)
        pieces = zip(
            inputs.tensor_split(MICROBATCHES), targets.tensor_split(MICROBATCHES), strict=True
        )
        for m, (x, y) in enumerate(pieces):
            for index, layer in enumerate(layers):
                seed_all(plain, plain.key(2, SEED, step, m, index), layer)
                x = layer(x)
            total, _ = square_sum(x, y)
            (total / SAMPLES).backward()
            trained.losses[-1] += total.item() / SAMPLES
        named = nn.ModuleList(layers).named_parameters()
        trained.gradients.append({f"layers.{n}": p.grad.clone() for n, p in named})
    return trained


def train(layers, ranks=2, **options):
    settings = {"microbatches": MICROBATCHES, "seed": SEED, **options}
    whole = together(train_ranks(layers, square_sum, BATCHES, ranks=ranks, **settings))
    return replace(whole, buffers={})  # buffers are not compared


def model(kind):
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), kind(), nn.Tanh(), kind(), kind()]


def test_step_does_not_change_users_random_state():
    layers = model(FromAll)
    own_generator = layers[1].first
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    np.random.randn()  # NumPy also stores a second normal number
    states = [
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        own_generator.getstate(),
    ]

    def body(world):
        pipe = Pipeline(
            layers, square_sum, microbatches=MICROBATCHES, recompute="always", world=world
        )
        pipe.step(*BATCHES[0])
        pipe.evaluate(*BATCHES[0])

    run_on_threads(1, body)
    after = [
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        own_generator.getstate(),
    ]
    for mine, theirs in zip(after, states, strict=True):
        assert all(map(np.array_equal, mine, theirs))


def test_steps_do_not_change_users_normal_numbers():
    """NumPy stores every second normal number outside the words of its generator."""
    np.random.seed(3)
    expected = np.random.randn(8).tolist()
    np.random.seed(3)
    drawn = []

    class Normal(nn.Module):
        def forward(self, x):
            return x + np.random.randn(3).sum()

    def body(world):
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Normal()]
        pipe = Pipeline(layers, square_sum, microbatches=MICROBATCHES, world=world)
        for _ in expected:
            pipe.step(*BATCHES[0])
            drawn.append(np.random.randn())

    run_on_threads(1, body)
    assert drawn == expected


class DrawsLate(Draw):
    """Draw from one or all sources, beginning in the third step."""

    def __init__(self, source):
        super().__init__()
        self.source, self.own = source, np.random.default_rng(0)
        self.register_buffer("count", torch.zeros(()))

    def draw(self):
        self.count += 1
        if self.count <= (STEPS - 1) * MICROBATCHES:
            return 0.0
        drawn = {
            "python": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(1).item(),
            "own": self.own.random,
        }
        if self.source == "all":
            return sum(draw() for draw in drawn.values())
        return drawn[self.source]()


def late_model(source):
    """Return layers of which the second and fourth begin to draw late; others always draw."""
    torch.manual_seed(0)
    kinds = (lambda: DrawsLate(source), FromPython, lambda: DrawsLate(source), FromAll)
    return [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), *[kind() for kind in kinds]]


@pytest.mark.parametrize("source", ["python", "numpy", "torch", "own", "all"])
def test_layer_that_begins_to_draw_late_is_seeded_immediately(plain, source):
    """Regression: its first numbers depended on earlier draws, and so on the layout."""
    expected = train_plain(plain, late_model(source))
    layouts = [(1, "gpipe"), (2, "gpipe"), (5, "gpipe"), (1, "one_f_one_b"), (3, "one_f_one_b")]
    by_order = {}  # GPipe adds the gradients of micro-batches in reverse order
    for (ranks, schedule), recompute in itertools.product(layouts, ["never", "always"]):
        ours = train(late_model(source), ranks, schedule=schedule, recompute=recompute)
        first = by_order.setdefault(schedule, ours)
        assert ours.losses == pytest.approx(expected.losses, rel=1e-12)
        assert ours.losses == first.losses
        steps = zip(ours.gradients, first.gradients, expected.gradients, strict=True)
        for mine, theirs, reference in steps:
            assert mine.keys() == reference.keys()
            for name, gradient in mine.items():
                assert torch.equal(gradient, theirs[name]), (ranks, schedule, recompute, name)
                torch.testing.assert_close(gradient, reference[name], rtol=1e-10, atol=1e-12)


def test_layer_that_begins_to_draw_reruns_but_updates_buffers_once():
    """The stage runs again to find the layer that draws; buffers must count micro-batches once."""
    layer = DrawsLate("numpy")
    runs = []
    layer.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    whole = together(
        train_ranks(
            [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), layer],
            square_sum,
            BATCHES,
            ranks=1,
            microbatches=MICROBATCHES,
            seed=SEED,
            recompute="never",
        )
    )
    assert whole.buffers["layers.1.count"].item() == STEPS * MICROBATCHES
    assert len(runs) == STEPS * MICROBATCHES + 1


def test_late_draws_are_seeded_if_batch_norm_spans_replicas():
    """Such a stage cannot run again on one replica, as the others would wait for its all-reduce."""

    def losses(stages, recompute):
        linear, late = late_model("all")[:2]

        def body(world):
            pipe = Pipeline(
                [linear, nn.BatchNorm1d(WIDTH, dtype=torch.float64), late],
                nn.functional.mse_loss,
                stages=stages,
                replicas=2,
                microbatches=MICROBATCHES,
                recompute=recompute,
                normalise_over_replicas=True,
                seed=SEED,
                world=world,
            )
            inputs, targets = BATCHES[0]
            own = pipe.share(len(inputs))
            return [float(pipe.step(inputs[own], targets[own]).loss) for _ in range(STEPS)]

        return run_on_threads(2 * stages, body)[0]

    expected = losses(1, "never")
    assert abs(expected[0] - expected[1]) < 1e-9 < abs(expected[1] - expected[2])
    for stages, recompute in ((1, "always"), (3, "never"), (3, "always")):
        # Replicas are summed in any order.
        assert losses(stages, recompute) == pytest.approx(expected, rel=1e-10)


class Disturbed(nn.Dropout):
    """Dropout during which another thread draws, in the runs listed in `when`."""

    def __init__(self, when):
        super().__init__(0.5)
        self.when, self.num_runs = when, 0

    def forward(self, x):
        self.num_runs += 1
        if self.num_runs in self.when:
            other = threading.Thread(target=torch.randperm, args=(10,))
            other.start()
            other.join()
        return super().forward(x)


def train_disturbed(layer, recompute="always", steps=2):
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), layer]

    def body(world):
        pipe = Pipeline(
            layers, square_sum, microbatches=MICROBATCHES, recompute=recompute, world=world
        )
        for inputs, targets in BATCHES[:steps]:
            pipe.step(inputs, targets)

    run_on_threads(1, body)


@pytest.mark.parametrize("run", [3, 2 * MICROBATCHES, 3 * MICROBATCHES, 4 * MICROBATCHES - 1])
def test_draws_of_another_thread_raise_error_with_layer_name(run):
    """Regression: torch.randperm in a data reader silently changed recomputed dropout masks."""
    expected = (
        r"layers\.1 \(Disturbed\): recomputation drew other random numbers .* torch\.Generator\(\)"
    )
    with pytest.raises(ActionError, match=expected):
        train_disturbed(Disturbed({run}))


def test_draws_of_another_thread_do_not_affect_layers_without_draws(caplog):
    class DrawsNothing(Disturbed):
        def forward(self, x):
            heads = super().forward(x).view(1, 1, -1, WIDTH)
            # Its operator is declared as random, but draws nothing without dropout.
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)[0, 0]

    layer = DrawsNothing(set(range(1, 100)) - {2 * MICROBATCHES, 2 * MICROBATCHES + 2})
    layer.p = 0.0
    train_disturbed(layer)
    train_disturbed(nn.Sequential(layer), recompute="never")
    assert not caplog.records


def on_another_thread(function, *args):
    """Call a function on a thread that already exists, as data readers do; return the result."""
    return OTHER_THREAD.submit(function, *args).result()


def other_warnings(caplog):
    """Return all logged messages but the one that another thread drew during a backward."""
    messages = [record.getMessage() for record in caplog.records]
    (seen,) = [each for each in messages if "during a backward; only forwards may draw" in each]
    assert "another thread" in seen
    return [each for each in messages if each != seen]


class DisturbedBetween(nn.Identity):
    """Identity in whose backward another thread draws; no layer draws there."""

    def forward(self, x):
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(self.disturb)
        return out

    def disturb(self, gradient):
        on_another_thread(torch.randperm, 10)
        return gradient


def test_draws_of_another_thread_without_recomputation_log_warning(caplog):
    """Without recomputation nothing runs twice, so the draws cannot be compared."""

    def body(world):
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Dropout(), DisturbedBetween()]
        pipe = Pipeline(
            layers,
            square_sum,
            microbatches=MICROBATCHES,
            recompute="never",
            schedule="one_f_one_b",
            world=world,
        )
        for inputs, targets in BATCHES:
            pipe.step(inputs, targets)

    run_on_threads(1, body)
    (warning,) = other_warnings(caplog)
    assert warning.startswith(
        "layers.1 (Dropout): draws from torch's default generator, from which"
    )


def test_search_for_drawing_layers_ends_if_other_code_draws(caplog):
    """Each search restores the random state, so other code would draw the same numbers again."""

    class Hooked(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient + 0 * on_another_thread(random.random))
            return out

    layers = [Hooked(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()]
    seen = []

    def body(world):
        pipe = Pipeline(
            layers,
            square_sum,
            microbatches=MICROBATCHES,
            recompute="never",
            schedule="one_f_one_b",
            world=world,
        )
        for inputs, targets in BATCHES * 6:
            random.seed(1)
            pipe.step(inputs, targets)
            seen.append(random.random())

    run_on_threads(1, body)
    random.seed(1)
    expected = [random.random() for _ in range(MICROBATCHES + 1)][-1]
    assert seen[-1] == expected
    (warning,) = other_warnings(caplog)
    assert warning.startswith("random numbers: code outside of layers")


def test_draws_of_other_code_while_layers_draw_log_warning(caplog):
    """Restoring a generator after a layer's run also restores it for other code."""

    class Hooked(FromPython):
        def forward(self, x):
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient + 0 * on_another_thread(random.random))
            return out

    train(model(Hooked)[:2], 1, recompute="never", schedule="one_f_one_b")
    (warning,) = other_warnings(caplog)
    assert warning.startswith("random numbers: code outside of layers")


def test_measuring_layers_does_not_change_users_random_state():
    """Otherwise the number of measured layers would change the user's random numbers."""
    states = random.getstate(), np.random.get_state()
    measure_layers([FromPython(), FromNumpy()], BATCHES[0][0])
    assert random.getstate() == states[0]
    assert all(map(np.array_equal, np.random.get_state(), states[1]))


# torch 2.10 for CUDA crashes if a second thread of a process compiles, even without a pipeline:
# FakeTensorMode requests a device guard from CUDA. Ranks are threads here.
COMPILES_ONCE = (
    torch.__version__.startswith("2.10.")
    and torch.version.cuda is not None
    and not torch.cuda.is_available()
)


@pytest.mark.skipif(COMPILES_ONCE, reason="torch 2.10 for CUDA, without a device")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_draws_of_another_thread_are_detected_in_compiled_layers(backend):
    """Regression: torch.compile does not support the dispatch mode that detects draws.

    It did not compile the layer, and with fullgraph=True it raised an error.
    """

    class Compiled(Disturbed):
        def __init__(self, when):
            super().__init__(when)
            inner = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Dropout())
            self.inner = torch.compile(inner, backend=backend, fullgraph=True)

        def forward(self, x):
            return super().forward(self.inner(x))

    train_disturbed(Compiled(()))
    with pytest.raises(
        ActionError, match=r"layers\.1 \(Compiled\): recomputation drew other random numbers"
    ):
        train_disturbed(Compiled({3 * MICROBATCHES}))


class Checkpointed(nn.Module):
    """Dropout in the layer's own checkpoint, whose backward seeds the global generators."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return checkpoint(self.dropped, x, use_reentrant=False)

    def dropped(self, x):
        dropped = nn.functional.dropout(self.linear(x), 0.5, training=self.training)
        time.sleep(0.002)  # gives other ranks time to draw
        return dropped * (1 + torch.rand_like(dropped))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_checkpoint_in_layer_does_not_affect_ranks_on_other_threads(recompute):
    """Regression: a checkpoint in a layer changed dropout masks of ranks in the same process."""

    def trained(world, replicas):
        pipe = Pipeline(
            [LayerSpec(Checkpointed) for _ in range(4)],
            nn.functional.mse_loss,
            replicas=replicas,
            microbatches=8 // replicas,
            schedule="one_f_one_b",
            recompute=recompute,
            world=world,
        )
        x = torch.linspace(-1, 1, 16 * WIDTH, dtype=torch.float64).view(16, WIDTH)
        own, found = pipe.share(len(x)), {}
        for _ in range(STEPS):
            pipe.step(x[own], x[own])
            for name, parameter in pipe.named_parameters():
                found.setdefault(name, []).append(parameter.grad.clone())
        return found

    alone = run_on_threads(1, lambda world: trained(world, 1))[0]
    for found in run_on_threads(4, lambda world: trained(world, 2)):
        for name, gradients in found.items():
            for given, expected in zip(gradients, alone[name], strict=True):
                torch.testing.assert_close(given, expected, msg=name)
