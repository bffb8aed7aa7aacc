"""AdaScale: equal to fairscale's and to the formulas, in every layout, over a resume."""

import json
import logging

import pytest
import torch
from fairscale.optim import AdaScale as FairscaleAdaScale
from torch import nn

from gpipe_hpc import AdaScale, LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.data_parallel.buckets import Bucket
from gpipe_hpc.engine.gradient_norms import MicrobatchSquaredNorms
from gpipe_hpc.errors import CheckpointError, ConfigError
from tests.support import batches, mean_square, metrics, square_sum, train_here

WIDTH, SIZE, STEPS, RATE = 4, 24, 6, 0.1
DATA = batches(STEPS, SIZE, WIDTH)


def schedule(step: int) -> float:
    """Return a rate that falls, so that a wrong number of steps shows."""
    return RATE * 0.9**step


def layers(number: int = 4) -> list[LayerSpec]:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    return [each for _ in range(number) for each in (linear, LayerSpec(nn.Tanh))]


def ours(ranks: int, *, noise_over: str = "microbatches", clip=None, model=layers, **options):
    """Train by our AdaScale on threads; return gains, rates, progress and the weights."""

    def body(world):
        pipe = Pipeline(
            model(), mean_square, noise_over=noise_over, partition="uniform", world=world, **options
        )
        adascale = AdaScale(pipe, scale=8, smoothing=0.6)
        optimizer = torch.optim.SGD(pipe.parameters() or [nn.Parameter(torch.zeros(1))], lr=1.0)
        gains, rates = [], []
        for inputs, targets in DATA:
            part = pipe.share(SIZE)
            result = pipe.step(inputs[part], targets[part])
            if clip is not None:
                pipe.clip_grad_norm_(clip)
            gains.append(adascale.update(result))
            rates.append(adascale.rate(schedule))
            for group in optimizer.param_groups:
                group["lr"] = rates[-1]
            optimizer.step()
        weights = {n: p.detach().clone() for n, p in pipe.named_parameters()}
        return gains, rates, adascale.progress, weights

    found = run_on_threads(ranks, body)
    assert all(each[:3] == found[0][:3] for each in found), "ranks disagree"
    weights = {name: weight for each in found for name, weight in each[3].items()}
    return *found[0][:3], weights


def fairscales(num_parts: int):
    """Train one plain process by fairscale's AdaScale, a backward for each part of the batch."""
    pipe = Pipeline(layers(), mean_square)  # for its weights alone
    model = nn.Sequential(
        *(layer for stage in pipe.stages.values() for layer in stage.layers.values())
    )
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    oracle = FairscaleAdaScale(
        sgd, world_size=1, scale=8, smoothing=0.6, num_gradients_to_accumulate=num_parts
    )
    gains, rates, progress = [], [], 0.0
    for inputs, targets in DATA:
        oracle.zero_grad()
        pieces = zip(inputs.tensor_split(num_parts), targets.tensor_split(num_parts), strict=True)
        for piece, wanted in pieces:
            (mean_square(model(piece), wanted) / num_parts).backward()
        gains.append(float(oracle.gain()))
        for group in sgd.param_groups:
            group["lr"] = schedule(int(progress))
        rates.append(gains[-1] * schedule(int(progress)))
        oracle.step()
        progress += gains[-1]
    weights = {f"layers.{name}": p.detach() for name, p in model.named_parameters()}
    return gains, rates, progress, weights


def assert_alike(one, other, near: float) -> None:
    assert one[0] == pytest.approx(other[0], rel=near)
    assert one[1] == pytest.approx(other[1], rel=near)
    assert one[2] == pytest.approx(other[2], rel=near)
    assert one[3].keys() == other[3].keys()
    for name, weight in one[3].items():
        torch.testing.assert_close(weight, other[3][name], rtol=near, atol=near)


LAYOUTS = {
    "one process": (1, {"microbatches": 8}),
    "2 x 2": (4, {"stages": 2, "replicas": 2, "microbatches": 4}),
    "1 x 4": (4, {"stages": 1, "replicas": 4, "microbatches": 2}),
    "4 stages, 1F1B": (4, {"stages": 4, "microbatches": 8, "schedule": "one_f_one_b"}),
    "recomputed": (2, {"stages": 2, "microbatches": 8, "recompute": "always"}),
    "split backwards": (2, {"stages": 2, "microbatches": 8, "schedule": "zb_h1"}),
    "two stages a rank": (
        2,
        {
            "stages": 2,
            "microbatches": 8,
            "schedule": "interleaved",
            "schedule_options": {"stages_per_rank": 2},
        },
    ),
    "mirrored": (2, {"stages": 2, "microbatches": 8, "schedule": "chimera"}),
    "buckets that leave early": (
        4,
        {"stages": 2, "replicas": 2, "microbatches": 4, "outer": {"bucket_bytes": 200}},
    ),
    "buckets that leave within W": (
        4,
        {
            "stages": 2,
            "replicas": 2,
            "microbatches": 4,
            "schedule": "zb_h1",
            "outer": {"bucket_bytes": 200},
        },
    ),
    "mirrored replicas": (
        4,
        {"stages": 2, "replicas": 2, "microbatches": 4, "schedule": "dualpipe"},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_fairscale_in_every_layout(layout):
    """Fairscale's hooks know no stages, and sum squares in float32: hence not to the last bit."""
    ranks, options = LAYOUTS[layout]
    oracle = fairscales(8)
    assert max(oracle[0]) > min(oracle[0]) > 1.05, "a gain that says nothing tests nothing"
    assert_alike(ours(ranks, **options), oracle, 1e-5)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_every_layout_has_the_same_gain(layout):
    ranks, options = LAYOUTS[layout]
    assert_alike(ours(ranks, **options), ours(1, microbatches=8), 1e-10)


def test_sums_that_are_there_at_once_are_not_taken_for_a_microbatchs(monkeypatch):
    """Other ranks' gradients may be in a bucket before the backward within which it left ends."""
    ranks, options = LAYOUTS["buckets that leave within W"]
    start, early = Bucket.start_reduction, []

    def start_and_wait(self, way):
        pending = start(self, way)
        assert pending is not None, "there are two replicas"
        pending.wait()
        self._pending = None

    look = MicrobatchSquaredNorms.before_reduction

    def count(self, parameters):
        early.append(sum(map(self._is_new, parameters)))
        look(self, parameters)

    monkeypatch.setattr(Bucket, "start_reduction", start_and_wait)
    monkeypatch.setattr(MicrobatchSquaredNorms, "before_reduction", count)
    found = ours(ranks, **options)
    assert sum(early) > 0, "nothing left within a backward"
    monkeypatch.undo()
    assert_alike(found, ours(1, microbatches=8), 1e-10)


@pytest.mark.parametrize(
    ("ranks", "options", "num_parts"),
    [
        (4, {"stages": 2, "replicas": 2, "microbatches": 4}, 2),
        (4, {"stages": 1, "replicas": 4, "microbatches": 2}, 4),
    ],
)
def test_over_replicas_equals_fairscale_with_as_many_processes(ranks, options, num_parts):
    found = ours(ranks, noise_over="replicas", **options)
    assert_alike(found, fairscales(num_parts), 1e-5)
    every = ours(ranks, **options)
    assert found[0] != pytest.approx(every[0], rel=1e-3), "over micro-batches it is another number"


def test_copies_of_a_mirrored_stage_are_parts():
    """The micro-batches of a route are one part, with one replica too."""
    options = {"stages": 2, "microbatches": 8, "schedule": "chimera"}
    pipes = run_on_threads(
        2,
        lambda world: _parts(
            Pipeline(layers(), mean_square, noise_over="replicas", world=world, **options)
        ),
    )
    route_of, squares, part_of = pipes[0]
    plain = Pipeline(layers(), mean_square, microbatches=1)
    inputs, targets = DATA[0]
    pieces = list(zip(inputs.tensor_split(8), targets.tensor_split(8), strict=True))
    for route in set(route_of):
        own = [pieces[m] for m in range(8) if route_of[m] == route]
        plain.step(torch.cat([i for i, _ in own]), torch.cat([t for _, t in own]))
        share = len(own) / 8
        expected = share**2 * sum(p.grad.square().sum().item() for p in plain.parameters())
        assert squares[route_of.index(route)] == pytest.approx(expected, rel=1e-10)
    assert part_of == tuple(route_of.index(route) for route in route_of)


def _parts(pipe):
    inputs, targets = DATA[0]
    result = pipe.step(inputs, targets)
    return pipe.schedule.placement.route_of, result.parts.squares.tolist(), result.parts.part_of


def test_clipping_changes_nothing_of_what_is_measured():
    clipped, free = ours(1, microbatches=8, clip=0.01), ours(1, microbatches=8)
    assert clipped[0][0] == free[0][0]
    # The second step is made with other weights.
    assert clipped[3]["layers.0.weight"].ne(free[3]["layers.0.weight"]).any()


def test_empty_microbatches_are_no_parts():
    pipe = Pipeline(layers(), mean_square, noise_over="microbatches", microbatches=8)
    adascale = AdaScale(pipe, scale=2)
    inputs, targets = DATA[0]
    mean, number = pipe.step(inputs[:3], targets[:3]).parts.mean_square()
    assert number == 3 and mean > 0
    assert adascale.update(pipe.step(inputs[:1], targets[:1])) == 1.0, "one part teaches nothing"
    assert adascale.progress == 1.0


def tied() -> list[LayerSpec]:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    ends = linear.tied({"weight": "w"})
    return [ends, LayerSpec(nn.Tanh), linear, LayerSpec(nn.Tanh), ends]


def test_tied_parameters_are_left_out_in_every_layout():
    """Ranks hold parts of one gradient: its norm per micro-batch nobody knows."""
    one = ours(1, microbatches=8, model=tied)
    assert_alike(ours(2, stages=2, microbatches=8, model=tied), one, 1e-10)
    split = {"stages": 2, "replicas": 2, "microbatches": 4, "schedule": "zb_h1"}
    assert_alike(ours(4, model=tied, **split), one, 1e-10)


def test_a_state_goes_on_as_it_was():
    def steps(adascale, pipe, first, last):
        return [adascale.update(pipe.step(*DATA[step])) for step in range(first, last)]

    def fresh():
        pipe = Pipeline(layers(), mean_square, noise_over="microbatches", microbatches=4)
        return AdaScale(pipe, scale=4, smoothing=0.6), pipe

    whole = steps(*fresh(), 0, 6)
    first, pipe = fresh()
    before = steps(first, pipe, 0, 3)
    kept = json.loads(json.dumps(first.state()))
    second, other = fresh()
    second.restore(kept)
    assert second.gain == first.gain and second.progress == first.progress
    assert before + steps(second, other, 3, 6) == whole
    with pytest.raises(CheckpointError, match="expected a state with keys progress, variance"):
        second.restore({"gain": 3.0})


def test_what_cannot_work_is_refused():
    measured = Pipeline(layers(), mean_square, noise_over="microbatches", microbatches=2)
    with pytest.raises(ConfigError, match="noise_over='microbatches'"):
        AdaScale(Pipeline(layers(), mean_square), scale=2)
    with pytest.raises(ConfigError, match="scale must be a finite number above 0, got 0"):
        AdaScale(measured, scale=0)
    with pytest.raises(ConfigError, match="smoothing must be at least 0 and below 1, got 1"):
        AdaScale(measured, scale=2, smoothing=1)
    with pytest.raises(ConfigError, match="got that of an evaluation"):
        AdaScale(measured, scale=2).update(measured.evaluate(*DATA[0]))
    with pytest.raises(ConfigError, match="got one part; use more"):
        Pipeline(layers(), mean_square, noise_over="microbatches")
    with pytest.raises(ConfigError, match="got one part; use noise_over=microbatches"):
        Pipeline(layers(), mean_square, noise_over="replicas", microbatches=4)
    with pytest.raises(ConfigError, match="expected one of microbatches, replicas, got 'all'"):
        Pipeline(layers(), mean_square, noise_over="all", microbatches=4)


RUN = (
    "model=mlp",
    "data=synthetic_vectors",
    "pipeline.partition=uniform",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "train.batch_size=32",
    "train.steps=60",
    "train.validate_every=0",
    "lr.warmup_steps=4",
    "lr.base_batch_size=4",
    "lr.scaling=adascale",
    "checkpoint.every=5",
    "checkpoint.keep=20",
)


def test_a_run_ends_when_the_base_batch_would_have_done_its_steps(tmp_path, same_end):
    """Stopped after some steps and gone on with, it is the same run to the last bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train_here(1, *RUN, f"run.dir={whole}")
    lines = [line for line in metrics(whole) if "loss" in line]
    assert lines[-1]["base_steps"] >= 60 > lines[-2]["base_steps"]
    assert len(lines) < 50, "a gain above 1 saves steps"
    progress = 0.0
    for line in lines:
        assert 1 <= line["gain"] <= 8
        progress += line["gain"]
        assert line["base_steps"] == pytest.approx(progress)
    stop = len(lines) // 2
    train_here(1, *RUN, f"run.dir={cut}", f"train.stop_at={stop}")
    train_here(1, *RUN, f"run.dir={cut}")
    same_end(whole, cut)
    # One that is complete goes on with nothing.
    train_here(1, *RUN, f"run.dir={cut}")
    same_end(whole, cut)


def test_a_run_has_the_same_gains_on_another_layout(tmp_path):
    one, four = tmp_path / "one", tmp_path / "four"
    train_here(1, *RUN, f"run.dir={one}", "train.steps=20")
    layout = ("pipeline.stages=2", "pipeline.replicas=2", "pipeline.microbatches=4")
    train_here(4, *RUN, f"run.dir={four}", "train.steps=20", *layout)
    gains = [[line["gain"] for line in metrics(run) if "gain" in line] for run in (one, four)]
    assert gains[0] == pytest.approx(gains[1], rel=1e-4)  # float32


def test_a_checkpoint_without_its_state_says_so(tmp_path, caplog):
    run = f"run.dir={tmp_path / 'run'}"
    train_here(1, *RUN, run, "lr.scaling=linear", "train.stop_at=5")
    with caplog.at_level(logging.WARNING, "gpipe_hpc.train"):
        train_here(1, *RUN, f"run.dir={tmp_path / 'new'}", f"checkpoint.resume={tmp_path / 'run'}")
    assert "its 5 steps count as steps of the base batch" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr.base_batch_size=null"], "lr.base_batch_size, expected the batch size for which"),
        (["lr.smoothing=0.5"], "lr.smoothing was removed"),
        (["lr.noise_over=all"], "lr.noise_over, expected one of microbatches, replicas"),
        (["lr.scaling=cubic"], "lr.scaling, expected one of linear, sqrt, adascale"),
    ],
)
def test_settings_are_checked(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_config(compose_config([*RUN, *overrides]), 1)


def test_another_optimizer_warns():
    config = compose_config([*RUN, "optimizer=adamw"])
    (doubt,) = check_config(config, 1)
    assert "derived for optimizer=sgd" in doubt


def test_the_copy_of_the_gradients_is_planned():
    measured = Pipeline(
        layers(), mean_square, noise_over="microbatches", microbatches=2, optimizer_states=1
    )
    assert measured.request.kept_states.gradient_copies == 1
    result = measured.step(*DATA[0])
    assert result.parts is not None
    (stage,) = measured.stages.values()
    kept = sum(each.nbytes for each in stage.squares._before.values())
    assert kept == sum(p.nbytes for p in measured.parameters())


def test_square_sum_losses_count_by_their_weight():
    """A loss that gives (sum, weight) has the parts of one that gives the mean."""
    found = []
    for loss in (mean_square, square_sum):
        pipe = Pipeline(layers(), loss, noise_over="microbatches", microbatches=5)
        mean, number = pipe.step(*DATA[0]).parts.mean_square()
        found.append(mean / pipe.grad_square())
        assert number == 5
    assert found[0] == pytest.approx(found[1], rel=1e-10)
