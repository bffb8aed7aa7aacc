"""Replicas with unequal numbers of micro-batches train like one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import build, schedule_names
from gpipe_hpc.settings import MicrobatchSplit, Outer
from tests.data_parallel.replicas import (
    WIDTH,
    blocks,
    make_block,
    one_process,
    sgd,
    specs_of,
)
from tests.support import batches, buffers_of, product, square_sum

ROWS = 25  # not divisible by 8: micro-batches have 3 or 4 rows
# schedule/families/test_families.py tests tables of all sizes. The reduction depends only on
# whether backwards are split and on which ranks hold a stage.
QUICK = ("one_f_one_b", "interleaved", "zb_v", "chimera", "auto")
SCHEDULES = [
    name if name in QUICK else product(name) for name in sorted({*schedule_names()} - {"file"})
]


def make(specs, world, stages, weights, microbatches, **options):
    return Pipeline(
        specs,
        square_sum,
        stages=stages,
        replicas=len(weights),
        microbatches=microbatches,
        seed=5,
        world=world,
        **{"partition": "uniform", "outer": {"weights": weights, "bucket_bytes": 300}} | options,
    )


def train(plain, layers, stages, weights, microbatches, **options):
    specs = specs_of(layers)

    def body(world):
        pipe = make(specs, world, stages, weights, microbatches, **options)
        assert pipe.num_global_microbatches == microbatches * len(weights)
        return plain.train_rank(pipe, batches(3, ROWS, WIDTH), optimizer=sgd, max_norm=0.5)

    return plain.unite(run_on_threads(stages * len(weights), body), stages)


def expected(plain, layers, shares):
    return one_process(plain, layers, ROWS, shares=shares)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unequal_replicas_match_one_process_in_every_schedule(plain, schedule):
    layers = blocks(plain, 8)
    ours = train(plain, layers, 2, [3, 1], 4, schedule=schedule)
    assert ours.distance(expected(plain, layers, [6, 2])) < 1e-12


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
@pytest.mark.parametrize(("weights", "shares"), [([3, 1], [6, 2]), ([2, 6], [2, 6])])
def test_two_unequal_replicas_are_bitwise_equal_to_one_process(plain, recompute, weights, shares):
    """Both sum in the same order: first within each replica, then over replicas."""
    layers = blocks(plain, 4)
    ours = train(plain, layers, 2, weights, 4, schedule="one_f_one_b", recompute=recompute)
    assert not ours.differences(expected(plain, layers, shares))


def test_three_replicas_match_one_process_up_to_summation_order(plain):
    layers = blocks(plain, 4)
    ours = train(plain, layers, 2, [2, 1, 1], 4)
    assert ours.distance(expected(plain, layers, [6, 3, 3])) < 1e-10
    even = train(plain, layers, 2, [1, 1, 1], 4)
    assert ours.distance(even) < 1e-10, "results depend on the shares"


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe", "hanayo"])
def test_ranks_with_several_stages_reduce_each_in_its_own_group(plain, schedule):
    """Replicas run different tables, so they may start their reductions in different orders."""
    layers = [*blocks(plain, 4), plain.Recipe(batch_norm, (WIDTH,)), *blocks(plain, 3)]
    specs = specs_of(layers)

    def body(world):
        pipe = make(specs, world, 2, [3, 1], 4, schedule=schedule)
        for inputs, targets in batches(3, ROWS, WIDTH):
            part = pipe.share(ROWS)
            loss = pipe.step(inputs[part], targets[part]).loss
        return loss, {name: buffer.clone() for name, buffer in buffers_of(pipe).items()}

    ranks = run_on_threads(4, body)
    assert len({loss for loss, _ in ranks}) == 1
    named = {}
    for _, buffers in ranks:
        for name, buffer in buffers.items():
            assert torch.equal(named.setdefault(name, buffer), buffer), name
    assert named


def batch_norm(width):
    return nn.BatchNorm1d(width).double()


def test_unequal_replicas_with_tied_parameters_match_one_replica(plain):
    def specs():
        first = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
        last = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64).tied({"weight": "both"})
        return [first.tied({"weight": "both"}), *[LayerSpec(make_block, WIDTH, True)] * 2, last]

    def run(weights, microbatches):
        def body(world):
            pipe = make(specs(), world, 2, weights, microbatches)
            return plain.train_rank(pipe, batches(3, ROWS, WIDTH), optimizer=sgd)

        return plain.unite(run_on_threads(2 * len(weights), body), 2)

    assert run([3, 1], 4).distance(run([1], 8)) < 1e-12


def test_evaluation_and_prediction_match_one_replica(plain):
    layers = blocks(plain, 4)
    specs = specs_of(layers)
    (inputs, targets) = batches(1, ROWS, WIDTH)[0]

    def body(world, weights):
        pipe = make(specs, world, 2, weights, 8 // len(weights))
        part = pipe.share(ROWS)
        loss = pipe.evaluate(inputs[part], targets[part]).loss
        return loss, pipe.predict(inputs[part]), len(inputs[part])

    ours = run_on_threads(4, lambda world: body(world, [3, 1]))
    one = run_on_threads(2, lambda world: body(world, [1]))
    assert [rows for *_, rows in ours] == [19, 19, 6, 6]
    assert torch.equal(torch.cat([ours[0][1], ours[2][1]]), one[0][1])
    assert abs(ours[0][0] - one[0][0]) < 1e-12


def test_checkpoint_resumes_with_other_replica_weights(plain, tmp_path):
    layers = blocks(plain, 4)
    specs = specs_of(layers)
    data = batches(4, ROWS, WIDTH)

    def body(world, weights, steps, loads=False, saves=False):
        pipe = make(specs, world, 2, weights, 8 // len(weights))
        optimizer = sgd(pipe.parameters())
        if loads:
            pipe.load(tmp_path / "kept", optimizer)
        for inputs, targets in data[pipe.steps_done : pipe.steps_done + steps]:
            part = pipe.share(ROWS)
            pipe.step(inputs[part], targets[part])
            optimizer.step()
        if saves:
            pipe.save(tmp_path / "kept", optimizer)
        return {name: p.detach().clone() for name, p in pipe.named_parameters()}

    run_on_threads(4, lambda world: body(world, [3, 1], 2, saves=True))
    resumed = run_on_threads(4, lambda world: body(world, [1, 3], 2, loads=True))
    through = run_on_threads(2, lambda world: body(world, [1], 4))
    for mine, theirs in zip(resumed, [*through, *through], strict=True):
        for name, weight in mine.items():
            assert torch.allclose(weight, theirs[name], rtol=0, atol=1e-12), name


def test_gradient_noise_is_measured_on_unequal_replicas(plain):
    """AdaScale compares the gradients of micro-batches, or of unequal replicas."""
    layers = blocks(plain, 4)
    specs = specs_of(layers)
    (inputs, targets) = batches(1, ROWS, WIDTH)[0]

    def body(world, weights, parts):
        pipe = make(specs, world, 2, weights, 8 // len(weights), noise_over=parts)
        part = pipe.share(ROWS)
        return pipe.step(inputs[part], targets[part]).parts

    ours = run_on_threads(4, lambda world: body(world, [3, 1], "microbatches"))[0]
    one = run_on_threads(2, lambda world: body(world, [1], "microbatches"))[0]
    assert torch.allclose(ours.squares, one.squares, rtol=1e-10)
    over_replicas = run_on_threads(4, lambda world: body(world, [3, 1], "replicas"))[0]
    assert over_replicas.part_of == (0,) * 6 + (6,) * 2
    assert [m for m, square in enumerate(over_replicas.squares.tolist()) if square > 0] == [0, 6]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 24))
def test_split_assigns_each_microbatch_once(weights, microbatches):
    try:
        split = MicrobatchSplit.divide(microbatches, len(weights), weights)
    except ConfigError as error:
        suggestions = str(error).partition("; use ")[2].partition(" micro-batches")[0].split(" or ")
        for number in map(int, suggestions):
            assert MicrobatchSplit.divide(number, len(weights), weights).total == number * len(
                weights
            )
        return
    assert split.total == microbatches * len(weights)
    owned = [split.owner(m) for m in range(split.total)]
    assert split.fullest == split.counts.index(split.most)
    assert owned == [(r, m) for r, count in enumerate(split.counts) for m in range(count)]
    assert [m for r in range(len(weights)) for m in split.of(r)] == list(range(split.total))
    for count, weight in zip(split.counts, weights, strict=True):
        assert count * sum(weights) == weight * split.total


@pytest.mark.parametrize("bad", [[3, 0], [3, -1], [1.5, 2], "31", [True, 1], 4])
def test_invalid_weights_are_rejected(bad):
    with pytest.raises(ConfigError, match=r"outer\.weights, expected a"):
        Outer(weights=bad).checked()


@pytest.mark.parametrize(
    ("weights", "options", "kind", "text"),
    [
        ([3, 1, 1], {"replicas": 2}, ConfigError, r"a weight for each of 2 replica\(s\), got 3"),
        ([3, 1], {"microbatches": 3}, ConfigError, r"2 x 3 = 6; use 2 or 4 micro-batches"),
        ([5, 1], {"microbatches": 1}, ConfigError, r"use 3 micro-batches"),
        ([3, 1], {"normalise_over_replicas": True}, ConfigError, r"BatchNorm pools"),
        (
            [3, 1],
            {"schedule": build("gpipe", ranks=1, microbatches=3), "microbatches": 2},
            ConfigError,
            r"outer\.weights: some replicas get 1 micro-batch.*schedule 'gpipe'",
        ),
    ],
)
def test_unsupported_weights_are_rejected_on_every_rank(weights, options, kind, text):
    def body(world):
        settings = {"replicas": len(weights), "microbatches": 4, "stages": 1} | options
        try:
            Pipeline(
                [LayerSpec(nn.Linear, WIDTH, WIDTH)],
                square_sum,
                world=world,
                outer={"weights": weights},
                **settings,
            )
        except Exception as error:
            return error

    errors = run_on_threads(2, body)
    assert any(isinstance(error, kind) for error in errors)
    for error in errors:
        with pytest.raises(type(error), match=text):
            raise error
