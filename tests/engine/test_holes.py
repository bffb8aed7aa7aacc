"""Partial replicas: any number of ranks trains as one process does."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError
from tests.support import batches, mean_square, product_of

WIDTH = 6
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SHAPES = [(3, 2), (5, 2), (5, 4), (6, 4), (7, 4), (7, 3)]
SIZES = (13, 16, 3, 11)  # with odd sizes, and one of fewer samples than micro-batches


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.3)


def specs():
    linear = partial(LayerSpec, nn.Linear, dtype=torch.float64)
    return [linear(3, WIDTH), *[LayerSpec(Block)] * 6, linear(WIDTH, 2)]


def data():
    return [(x[:size], y[:size]) for size, (x, y) in zip(SIZES, batches(4, 16, 3, 2), strict=True)]


def make(world=None, **settings):
    pipe = Pipeline(specs(), mean_square, seed=5, world=world, **settings)
    return pipe, pipe.optimizer(ADAMW)


def train(pipe, optimizer, steps):
    """Train with clipping; return loss, gradient norm and this rank's gradients of each step."""
    found = []
    for inputs, targets in steps:
        part = pipe.share(len(inputs))
        loss = pipe.step(inputs[part], targets[part]).loss
        norm = pipe.clip_grad_norm_(0.2).item()
        found.append((loss, norm, {n: g.clone() for n, g in pipe.gradients().items()}))
        optimizer.step()
    return found


def run(world=None, **settings):
    return train(*make(world, **settings), data())


@pytest.fixture(scope="module")
def alone():
    """Return a function that trains in one process and caches the result by micro-batches."""
    known = {}

    def train_alone(microbatches):
        if microbatches not in known:
            (known[microbatches],) = run_on_threads(1, partial(run, microbatches=microbatches))
        return known[microbatches]

    return train_alone


def assert_same(ranks, expected):
    """Assert that the ranks together have the results of one process, for all parameters."""
    for step, (loss, norm, gradients) in enumerate(expected):
        seen = {}
        for own_loss, own_norm, own in (rank[step] for rank in ranks):
            assert (own_loss, own_norm) == pytest.approx((loss, norm), abs=1e-10)
            for name, gradient in own.items():
                assert torch.equal(seen.setdefault(name, gradient), gradient), "copies differ"
                assert torch.allclose(gradient, gradients[name], rtol=0, atol=1e-10)
        assert seen.keys() == gradients.keys()


@product_of(
    "shape, schedule, recompute, shard",
    SHAPES,
    ("gpipe", "one_f_one_b", "zb_h1", "auto"),
    ("always", "except_last", "never"),
    ("none", "flat"),
)
def test_partial_replica_trains_as_one_process(alone, shape, schedule, recompute, shard):
    """Covers dropout, clipping, odd batch sizes, and fewer samples than micro-batches."""
    ranks, stages = shape
    rows = -(-ranks // stages)
    settings = {"stages": stages, "microbatches": 3, "outer": {"shard": shard}}
    found = run_on_threads(ranks, partial(run, schedule=schedule, recompute=recompute, **settings))
    assert_same(found, alone(3 * rows))


@product_of(
    "shape, schedule, recompute",
    [(3, 2), (5, 2), (7, 4)],
    ("gpipe", "one_f_one_b", "zb_h1", "auto"),
    ("except_last", "never"),
)
def test_partial_replica_with_slow_ranks_trains_as_one_process(alone, shape, schedule, recompute):
    """The second rank takes twice as long as the others, and the last one four times as long."""
    ranks, stages = shape
    paces = [1, 2, *[1] * (ranks - 3), 4]
    settings = {"stages": stages, "microbatches": 3, "paces": paces, "recompute": recompute}

    def body(world):
        pipe, optimizer = make(world, schedule=schedule, **settings)
        return pipe.partition.rank_paces, train(pipe, optimizer, data())

    found = run_on_threads(ranks, body)
    assert all(used_paces == tuple(paces) for used_paces, _ in found)
    assert_same([steps for _, steps in found], alone(3 * -(-ranks // stages)))


def test_ranks_with_a_partial_replica_all_take_the_whole_batch():
    def body(world):
        pipe, _ = make(world, stages=4, microbatches=3)
        return pipe.replica, pipe.stage_rank, pipe.share(13), pipe.needs_inputs, list(pipe.stages)

    found = run_on_threads(7, body)
    assert [each[:3] for each in found] == [(0, rank, slice(0, 13)) for rank in range(7)]
    stages_of_ranks = [stages for *_, stages in found]
    assert all(len(stages) == 1 for stages in stages_of_ranks)
    assert sorted(Counter(stage for (stage,) in stages_of_ranks).values()) == [1, 2, 2, 2]
    assert [each[3] for each in found] == [0 in stages for stages in stages_of_ranks]


def test_replicas_setting_determines_number_of_microbatches(alone):
    """A run on eight ranks keeps its micro-batches on five or four ranks."""
    for ranks in (5, 4):
        found = run_on_threads(ranks, partial(run, stages=4, replicas=2, microbatches=3))
        assert_same(found, alone(6))


@pytest.mark.parametrize("ranks", [2, 5])
def test_fitted_number_of_stages_trains_as_one_process(alone, ranks):
    """The number of micro-batches is the requested one for any number of ranks."""
    settings = {"stages": "fit", "replicas": 2, "microbatches": 3, "schedule": "zb_h1"}
    assert_same(run_on_threads(ranks, partial(run, **settings)), alone(6))


def test_checkpoint_moves_between_complete_and_partial_replicas(tmp_path, alone):
    """One training runs on 8 = 2 x 4 ranks, then on 7, on 4, and on 3 with 2 stages."""
    layouts = [
        (8, {"stages": 4, "replicas": 2, "microbatches": 3}),
        (7, {"stages": 4, "microbatches": 3, "schedule": "zb_h1"}),
        (4, {"stages": 4, "microbatches": 6, "schedule": "one_f_one_b"}),
        (3, {"stages": 2, "microbatches": 3}),
    ]
    steps = data()
    for step, (ranks, settings) in enumerate(layouts):

        def body(world, step=step, settings=settings):
            pipe, optimizer = make(world, **settings)
            if step:
                pipe.load(tmp_path / str(step - 1), optimizer)
            found = train(pipe, optimizer, steps[step : step + 1])
            pipe.save(tmp_path / str(step), optimizer)
            return found

        assert_same(run_on_threads(ranks, body), alone(6)[step : step + 1])


def test_partial_replica_evaluates_and_predicts_as_one_process():
    inputs, targets = batches(1, 13, 3, 2)[0]

    def body(world, **settings):
        pipe, _ = make(world, **settings)
        return pipe.evaluate(inputs, targets).loss, pipe.predict(inputs)

    ((loss, outputs),) = run_on_threads(1, partial(body, microbatches=6))
    for own_loss, own in run_on_threads(7, partial(body, stages=4, microbatches=3)):
        assert own_loss == pytest.approx(loss, abs=1e-12)
        assert torch.allclose(own, outputs, rtol=0, atol=1e-12)


def test_partial_replica_on_processes_trains_as_one_process(processes, tmp_path, alone):
    """Three processes with two stages; all-reduces of replicated stages use the real backend."""

    def body(rank):
        return run(stages=2, microbatches=3, schedule="zb_h1")

    assert_same(processes(3, body, tmp_path), alone(6))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "zb_v"}, r"use one of gpipe, one_f_one_b, zb_h1.*start 2 or 4 ranks"),
        ({"schedule": "auto", "schedule_options": {"placement": "wave"}}, "auto with placement"),
        (
            {"outer": {"every": 2}},
            "outer.every: .* complete replicas, but 3 ranks are not a multiple of 2 stages",
        ),
        ({"outer": {"weights": [1, 2]}}, "outer.weights: .* but 3 ranks"),
        ({"normalise_over_replicas": True}, "normalise_over_replicas: .* but 3 ranks"),
        ({"noise_over": "replicas"}, "noise_over: .* but 3 ranks"),
        ({"stages": "fitting"}, "bad stages, expected a whole number, null or fit, got 'fitting'"),
        (
            {"schedule": "rerouted", "schedule_options": {"stages": 3}},
            "the option stages=3 conflicts with stages=2",
        ),
    ],
)
def test_unsupported_setting_raises_error_with_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_on_threads(3, partial(make, **{"stages": 2, "microbatches": 2, **settings}))


def test_complete_replicas_are_used_if_the_ranks_suffice(alone):
    """Regression: eight ranks with four stages were refused, although seven ranks were accepted."""
    places = run_on_threads(8, lambda world: make(world, stages=4, microbatches=3)[0].mesh)
    assert {(mesh.replicas, mesh.stages) for mesh in places} == {(2, 4)}
    found = run_on_threads(6, partial(run, stages=3, microbatches=3))
    assert_same(found, alone(6))


def test_one_replica_on_the_ranks_of_two_raises_error():
    with pytest.raises(ConfigError, match=r"pipeline\.replicas, as pipeline\.replicas=2"):
        run_on_threads(8, partial(make, stages=4, replicas=1))
