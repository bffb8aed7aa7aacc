"""Bucketed gradient reduction over replicas matches one process, whenever buckets are sent."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_hpc import run_on_threads
from gpipe_hpc.errors import ActionError, ConfigError, ModelError, PeerError
from gpipe_hpc.schedule import Action, Op, schedule_names
from tests.data_parallel.replicas import (
    MICROBATCHES,
    WIDTH,
    blocks,
    make,
    make_block,
    one_process,
    sgd,
)
from tests.support import batches

ROWS = 16
QUICK = ("one_f_one_b", "zb_v", "chimera")  # unsplit backward, split backward, mirrored stages
SCHEDULES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.product)
    for name in sorted({*schedule_names()} - {"file", "auto"})
]


def train(plain, layers, ranks, stages, **options):
    data = batches(3, ROWS, WIDTH)

    def body(world):
        pipe = make(layers, world, stages, **options)
        return plain.train_rank(pipe, data, optimizer=sgd, max_norm=0.5)

    return plain.unite(plain.on_threads(ranks, body), stages)


def expected(plain, layers, replicas):
    return one_process(plain, layers, ROWS, replicas=replicas, microbatches=MICROBATCHES)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.product)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_replicas_match_one_process_in_every_schedule(plain, schedule, overlap):
    layers = blocks(plain, 8)
    outer = {"bucket_bytes": 300, "overlap": overlap}
    ours = train(plain, layers, 4, 2, schedule=schedule, outer=outer)
    assert ours.distance(expected(plain, layers, 2)) < 1e-12


@pytest.mark.parametrize("recompute", ["always", "except_last", "never"])
@pytest.mark.parametrize("bucket_bytes", [8, 1000, "25MB"])
def test_two_replicas_are_bitwise_equal_to_one_process(plain, bucket_bytes, recompute):
    layers = blocks(plain)
    outer = {"bucket_bytes": bucket_bytes}
    ours = train(plain, layers, 4, 2, schedule="one_f_one_b", recompute=recompute, outer=outer)
    assert not ours.differences(expected(plain, layers, 2))


def test_four_replicas_match_one_process_up_to_summation_order(plain):
    layers = [plain.Recipe(make_block, (WIDTH, True)) for _ in range(2)]
    ours = train(plain, layers, 4, 1, outer={"bucket_bytes": 300})
    assert ours.distance(expected(plain, layers, 4)) < 1e-10


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_buckets_are_sent_during_backward_actions(plain, schedule):
    """From the second step on, and in the same order on all replicas."""

    def body(world):
        layers = [plain.Recipe(make_block, (WIDTH, True)) for _ in range(4)]
        pipe = make(layers, world, 2, schedule=schedule, outer={"bucket_bytes": 8})
        sent = []

        def recorded(strategy, flat, items):
            sent.append((world.activity, flat.numel()))
            return strategy(flat, items)

        for stage in pipe.stages.values():
            stage.gradients._strategy = partial(recorded, stage.gradients._strategy)
        for inputs, targets in batches(3, ROWS, WIDTH):
            part = pipe.share(ROWS)
            pipe.step(inputs[part], targets[part])
        return sent

    for stage_rank in range(2):
        first, other = (run for run in run_on_threads(4, body)[stage_rank::2])
        assert [size for _, size in first] == [size for _, size in other]
        per_step = len(first) // 3
        later = [action for action, _ in first[per_step:]]
        assert {action.op for action in later} <= {Op.B, Op.W}, (
            "a reduction started after the backwards"
        )
        assert all(isinstance(action, Action) for action in later)


class NestedBackward(nn.Module):
    """Applies its layer `times` times, each with a nested backward that adds to the gradient."""

    times = 1

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x):
        for _ in range(NestedBackward.times):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


def test_bucket_waits_for_gradients_of_nested_backwards(plain, monkeypatch):
    monkeypatch.setattr(NestedBackward, "times", 3)
    layers = [plain.Recipe(make_block, (WIDTH, True)), plain.Recipe(NestedBackward, (WIDTH,))]
    ours = train(plain, layers, 2, 1, recompute="never", outer={"bucket_bytes": 8})
    assert ours.distance(expected(plain, layers, 2)) < 1e-12


def test_gradient_computed_after_its_bucket_was_sent_raises(plain, monkeypatch):
    """The layer runs more nested backwards than before. Otherwise a gradient would be lost."""
    layers = [plain.Recipe(make_block, (WIDTH, True)), plain.Recipe(NestedBackward, (WIDTH,))]

    def body(world):
        pipe = make(layers, world, 1, recompute="never", outer={"bucket_bytes": 8})
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        for _ in range(2):
            pipe.step(inputs[part], targets[part])
        world.world_group.all_reduce(torch.zeros(1))
        if world.rank == 0:
            NestedBackward.times = 2
        world.world_group.all_reduce(torch.zeros(1))
        pipe.step(inputs[part], targets[part])

    monkeypatch.setattr(NestedBackward, "times", 1)
    with pytest.raises(
        ActionError, match=r"layers\.1\.inner.*after its bucket was sent.*outer\.overlap=false"
    ):
        run_on_threads(2, body)


class Meddling(torch.autograd.Function):
    """Identity whose backward calls a function that changes another parameter's gradient."""

    @staticmethod
    def forward(ctx, x, meddle):
        ctx.meddle = meddle
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.meddle()
        return gradient, None


class Meddler(nn.Module):
    meddle = staticmethod(lambda: None)

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x):
        return Meddling.apply(self.inner(x), lambda: Meddler.meddle())


def add_in_place(parameter):
    parameter.grad += 1


def put_another(parameter):
    parameter.grad = parameter.grad + 1


@pytest.mark.parametrize("change", [add_in_place, put_another])
def test_modifying_a_gradient_after_its_bucket_was_sent_raises(plain, monkeypatch, change):
    """Detects writes that bypass autograd, such as kernels that add to `.grad`."""
    layers = [plain.Recipe(Meddler, (WIDTH,)), plain.Recipe(make_block, (WIDTH, True))]

    def body(world):
        pipe = make(layers, world, 1, recompute="never", outer={"bucket_bytes": 8})
        named = dict(pipe.named_parameters())
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        for _ in range(2):
            pipe.step(inputs[part], targets[part])
        world.world_group.all_reduce(torch.zeros(1))
        if world.rank == 0:
            Meddler.meddle = lambda: change(named["layers.1.scale"])
        world.world_group.all_reduce(torch.zeros(1))
        pipe.step(inputs[part], targets[part])

    monkeypatch.setattr(Meddler, "meddle", Meddler.meddle)
    with pytest.raises(
        ActionError, match=r"layers\.1\.scale.*after its bucket was sent.*outer\.overlap=false"
    ):
        run_on_threads(2, body)


STRATEGIES = [
    {"hierarchy": 2},
    {"hierarchy": "host"},
    {"order": "rank"},
]


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(4, 2), (4, 1), pytest.param(6, 2, marks=pytest.mark.product)],
)
@pytest.mark.parametrize("way", STRATEGIES, ids=str)
def test_each_reduction_strategy_matches_one_process(plain, way, ranks, stages):
    layers = blocks(plain)
    replicas = ranks // stages
    if way.get("hierarchy") == 2 and replicas % 2:
        way = {"hierarchy": 3}
    outer = {**way, "bucket_bytes": 300}
    ours = train(plain, layers, ranks, stages, schedule="one_f_one_b", outer=outer)
    whole = expected(plain, layers, replicas)
    assert ours.distance(whole) < 1e-10
    if replicas == 2 or way.get("order") == "rank":
        assert not ours.differences(whole)


@pytest.mark.parametrize(
    "schedule",
    [
        "chimera",
        *(pytest.param(n, marks=pytest.mark.product) for n in ("dualpipe_v", "gems", "zb_v")),
    ],
)
def test_rank_ordered_sums_are_bitwise_equal_for_any_bucket_size(plain, schedule):
    """With mirrored stages, two ranks of each replica hold a stage."""
    layers = blocks(plain, 8)
    trainings = [
        train(
            plain,
            layers,
            6,
            2,
            schedule=schedule,
            outer={"order": "rank", "bucket_bytes": size, "overlap": overlap},
        )
        for size, overlap in ((8, True), (1000, False), (1e9, True))
    ]
    assert not trainings[0].differences(trainings[1])
    assert not trainings[0].differences(trainings[2])
    assert trainings[0].distance(expected(plain, layers, 3)) < 1e-10


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"bucket_bytes": 0}, r"outer\.bucket_bytes, expected more than 0"),
        ({"bucket_bytes": "many"}, r"outer\.bucket_bytes"),
        ({"bucket_bytes": None}, r"outer\.bucket_bytes, expected"),
        ({"overlap": "maybe"}, r"outer\.overlap, expected true or false, got 'maybe'"),
        ({"powersgd_rank": 1.5}, r"outer\.powersgd_rank, expected a whole number, got 1\.5"),
        ({"topk_fraction": "x"}, r"outer\.topk_fraction, expected a number, got 'x'"),
        ({"every": True}, r"outer\.every, expected a whole number, got True"),
        ("none", "outer: expected an Outer or a dict of its settings, got 'none'"),
        (None, "outer: expected an Outer or a dict of its settings, got None"),
        ({"buckets": 3}, "outer: unknown setting buckets.*bucket_bytes"),
        ({"order": "rnak"}, r"outer\.order, expected one of backend, rank, got 'rnak'"),
        ({"algorithm": "ring"}, r"outer\.algorithm was removed.*order=rank"),
        ({"hierarchy": "rack"}, r"outer\.hierarchy, expected none, host or a number of replicas"),
        ({"hierarchy": 0}, r"outer\.hierarchy, expected none, host or a number"),
        ({"hierarchy": 3}, r"outer\.hierarchy, expected a divisor of the 2 copies.*1, 2, or host"),
        ({"order": "rank", "hierarchy": 2}, "and .* cannot be combined.* set only one"),
    ],
)
def test_invalid_outer_setting_is_rejected_on_every_rank(plain, outer, message):
    layers = [plain.Recipe(make_block, (WIDTH, True))]

    def body(world):
        # Rank 0 reports errors of the layout to the others, which raise PeerError.
        with pytest.raises((ConfigError, PeerError), match=message):
            make(layers, world, 1, outer=outer)

    run_on_threads(2, body)


@pytest.mark.parametrize("overlap", [True, False])
def test_hook_that_clears_a_gradient_leaves_no_gradient(plain, overlap):
    """Regression: with replicas, `.grad` was the sum of contributions that the hook had cleared."""

    def clear_gradient(parameter):
        parameter.grad = None

    def body(world):
        layers = [plain.Recipe(make_block, (WIDTH, True)) for _ in range(2)]
        pipe = make(layers, world, 1, outer={"bucket_bytes": 300, "overlap": overlap})
        named = dict(pipe.named_parameters())
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        named["layers.0.first.weight"].register_post_accumulate_grad_hook(clear_gradient)
        if pipe.replica == 1:  # its contribution is missing from the sum
            named["layers.1.scale"].register_post_accumulate_grad_hook(clear_gradient)
        for _ in range(2):
            pipe.step(inputs[part], targets[part])
        return {name: parameter.grad for name, parameter in named.items()}

    first, second = run_on_threads(2, body)
    assert [name for name, grad in first.items() if grad is None] == ["layers.0.first.weight"]
    assert first.keys() == second.keys()
    assert torch.equal(first["layers.1.scale"], second["layers.1.scale"])

    def alone(world):
        layers = [plain.Recipe(make_block, (WIDTH, True)) for _ in range(2)]
        pipe = make(layers, world, 1)
        inputs, targets = batches(1, ROWS, WIDTH)[0]
        half = ROWS // 2
        for _ in range(2):
            pipe.step(inputs[:half], targets[:half])
        return {name: p.grad.clone() for name, p in pipe.named_parameters()}

    (own,) = run_on_threads(1, alone)
    # The weight counts the second replica's samples, but its gradient is missing.
    assert torch.allclose(first["layers.1.scale"], own["layers.1.scale"] / 2, atol=1e-12)


def test_parameter_frozen_on_one_replica_raises_on_all(plain):
    """Otherwise it would be summed with another parameter of equal size."""
    layers = [plain.Recipe(nn.Linear, (WIDTH, WIDTH, True, None, torch.float64)) for _ in range(2)]

    def body(world):
        pipe = make(layers, world, 1)
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        frozen = "layers.1.bias" if world.rank else "layers.0.bias"
        dict(pipe.named_parameters())[frozen].requires_grad_(False)
        with pytest.raises(ModelError, match=r"layers\.0\.bias: rank \d trains .* frozen on rank"):
            pipe.step(inputs[part], targets[part])

    run_on_threads(2, body)
