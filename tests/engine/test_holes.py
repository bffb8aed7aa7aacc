"""Any number of ranks: pipelines with holes train as one process does."""

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
SIZES = (13, 16, 3, 11)  # odd ones, and one of fewer samples than micro-batches


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
    """Train, clipping; return of each step the loss, the norm and this rank's gradients."""
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
    """Return what one process does with so many micro-batches, each number once."""
    known = {}

    def train_alone(microbatches):
        if microbatches not in known:
            (known[microbatches],) = run_on_threads(1, partial(run, microbatches=microbatches))
        return known[microbatches]

    return train_alone


def assert_same(ranks, expected):
    """Assert that ranks together did what one process did, and that none is left out."""
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
def test_holes_train_as_one_process_does(alone, shape, schedule, recompute, shard):
    """With dropout, clipping, odd batches, and fewer samples than micro-batches."""
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
def test_holes_train_the_same_on_slow_ranks(alone, shape, schedule, recompute):
    """The last rank takes four times as long, and the second one twice."""
    ranks, stages = shape
    paces = [1, 2, *[1] * (ranks - 3), 4]
    settings = {"stages": stages, "microbatches": 3, "paces": paces, "recompute": recompute}

    def body(world):
        pipe, optimizer = make(world, schedule=schedule, **settings)
        return pipe.partition.rank_paces, train(pipe, optimizer, data())

    found = run_on_threads(ranks, body)
    assert all(told == tuple(paces) for told, _ in found)
    assert_same([steps for _, steps in found], alone(3 * -(-ranks // stages)))


def test_a_pipeline_with_holes_is_one_replica_that_takes_the_whole_batch():
    def body(world):
        pipe, _ = make(world, stages=4, microbatches=3)
        return pipe.replica, pipe.stage_rank, pipe.share(13), pipe.needs_inputs, list(pipe.stages)

    found = run_on_threads(7, body)
    assert [each[:3] for each in found] == [(0, rank, slice(0, 13)) for rank in range(7)]
    held = [stages for *_, stages in found]
    assert all(len(stages) == 1 for stages in held)
    assert sorted(Counter(stage for (stage,) in held).values()) == [1, 2, 2, 2]
    assert [each[3] for each in found] == [0 in stages for stages in held]


def test_replicas_say_how_many_pipelines_the_batch_is_cut_for(alone):
    """Two pipelines of four on eight ranks go on, with the same micro-batches, on five or four."""
    for ranks in (5, 4):
        found = run_on_threads(ranks, partial(run, stages=4, replicas=2, microbatches=3))
        assert_same(found, alone(6))


@pytest.mark.parametrize("ranks", [2, 5])
def test_stages_that_fit_the_ranks_train_the_same(alone, ranks):
    """The micro-batches stay those of the request, however many ranks come."""
    settings = {"stages": "fit", "replicas": 2, "microbatches": 3, "schedule": "zb_h1"}
    assert_same(run_on_threads(ranks, partial(run, **settings)), alone(6))


def test_a_checkpoint_moves_between_whole_pipelines_holes_and_one(tmp_path, alone):
    """8 = 2 x 4 ranks, then 7 with a hole, then 4, then 3 of 2 stages: one training."""
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


def test_evaluation_and_prediction_take_all_routes():
    inputs, targets = batches(1, 13, 3, 2)[0]

    def body(world, **settings):
        pipe, _ = make(world, **settings)
        return pipe.evaluate(inputs, targets).loss, pipe.predict(inputs)

    ((loss, outputs),) = run_on_threads(1, partial(body, microbatches=6))
    for own_loss, own in run_on_threads(7, partial(body, stages=4, microbatches=3)):
        assert own_loss == pytest.approx(loss, abs=1e-12)
        assert torch.allclose(own, outputs, rtol=0, atol=1e-12)


def test_copies_of_a_stage_of_real_processes_are_one(processes, tmp_path, alone):
    """Three processes, two stages: the sums over copies go through the backend."""

    def body(rank):
        return run(stages=2, microbatches=3, schedule="zb_h1")

    assert_same(processes(3, body, tmp_path), alone(6))


@pytest.mark.parametrize(
    ("settings", "words"),
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
        ({"stages": "fitting"}, "stages: expected one of fit, got 'fitting'"),
        (
            {"schedule": "rerouted", "schedule_options": {"stages": 3}},
            "the option stages=3 conflicts with stages=2",
        ),
    ],
)
def test_what_holes_cannot_do_is_refused_with_a_remedy(settings, words):
    with pytest.raises(ConfigError, match=words):
        run_on_threads(3, partial(make, **{"stages": 2, "microbatches": 2, **settings}))


def test_ranks_that_make_whole_pipelines_are_these(alone):
    """Eight ranks with four stages were refused, while seven of them ran with a hole."""
    places = run_on_threads(8, lambda world: make(world, stages=4, microbatches=3)[0].mesh)
    assert {(mesh.replicas, mesh.stages) for mesh in places} == {(2, 4)}
    found = run_on_threads(6, partial(run, stages=3, microbatches=3))
    assert_same(found, alone(6))


def test_one_pipeline_does_not_take_the_ranks_of_two():
    with pytest.raises(ConfigError, match=r"pipeline\.replicas, as pipeline\.replicas=2"):
        run_on_threads(8, partial(make, stages=4, replicas=1))
