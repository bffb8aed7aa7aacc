"""Errors are raised on every rank, with the same clear message."""

import contextlib
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import (
    ActionError,
    ConfigError,
    DataError,
    ModelError,
    PartitionError,
    PeerError,
    ScheduleError,
)
from gpipe_hpc.schedule import build
from tests.support import batch, linears, mean_square

WIDTH = 4


def failures(size, body):
    """Run `body(world)` on all ranks and return the exception of each."""
    raised = {}

    def record_error(world):
        try:
            body(world)
        except Exception as error:
            raised[world.rank] = error
            raise

    with contextlib.suppress(Exception):
        run_on_threads(size, record_error, timeout_s=10)
    assert raised.keys() == set(range(size)), "a rank went on as if nothing had happened"
    return [raised[rank] for rank in range(size)]


def assert_all_report(errors, failed, kind, *words):
    """Assert that the failed rank raises `kind` and others a PeerError, all with the same words."""
    for rank, error in enumerate(errors):
        assert isinstance(error, kind if rank == failed else PeerError), repr(error)
        for word in words:
            assert word in str(error), f"rank {rank}: {word!r} is not in: {error}"


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"stages": 4}, ConfigError, "stages x replicas = world size, got 4 x 1 = 4 with 3"),
        ({"replicas": 2}, ConfigError, "1 x 2 = 2 with 3 rank"),
        ({"schedule": "gpip"}, ScheduleError, "gpipe, one_f_one_b"),
        ({"schedule": 7}, ScheduleError, "a name .*got int"),
        ({"schedule": build("gpipe", ranks=2, microbatches=1)}, ConfigError, "3 ranks and 1"),
        ({"schedule_options": {"waves": 2}}, ScheduleError, "waves"),
        ({"recompute": "often"}, ConfigError, "always, except_last, never"),
        ({"microbatches": 0}, ConfigError, "microbatches"),
        ({"device": "tpu", "world": None}, ConfigError, "expected auto, cpu, cuda"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_invalid_setting_is_rejected_on_every_rank(settings, kind, words):
    def body(world):
        Pipeline(linears(3), mean_square, **{"world": world, **settings})

    for error in failures(3, body):
        assert isinstance(error, kind | PeerError)
        with pytest.raises(type(error), match=words):
            raise error


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ([1, 1], "2"),
        ([1, 1, 2], "4"),
        ([4, -1, 0], "-1"),
        ("alphabetical", "parameters, uniform, time"),
        ("time", "example"),
    ],
)
def test_invalid_partition_is_rejected_on_every_rank(partition, words):
    def body(world):
        Pipeline(linears(3), mean_square, partition=partition, world=world)

    assert_all_report(failures(3, body), 0, PartitionError, "partition", words)


def test_more_stages_than_layers_are_rejected():
    def body(world):
        Pipeline(linears(2), mean_square, world=world)

    assert_all_report(failures(3, body), 0, PartitionError, "3", "2")


@pytest.mark.parametrize("model", [[], [nn.Linear], nn.Linear(2, 2), [nn.ReLU(), "layer"]])
def test_invalid_model_is_rejected(model):
    def body(world):
        Pipeline(model, mean_square, world=world)

    for error in failures(1, body):
        assert isinstance(error, ModelError)


def test_tied_parameters_of_unequal_shapes_are_rejected():
    layers = [
        LayerSpec(nn.Linear, WIDTH, WIDTH).tied({"weight": "w"}),
        LayerSpec(nn.Linear, WIDTH, WIDTH + 1).tied({"weight": "w"}),
    ]

    def body(world):
        Pipeline(layers, mean_square, world=world)

    for error in failures(2, body):
        assert isinstance(error, ModelError | PeerError)
        assert "weight cannot be tied to layers.0.weight" in str(error)


def test_different_seeds_on_ranks_are_rejected():
    def body(world):
        Pipeline(linears(2), mean_square, seed=world.rank, world=world)

    for error in failures(2, body):
        assert isinstance(error, ConfigError | PeerError)
        assert "same seed on every rank" in str(error) and "1 on rank 1" in str(error)


def test_layer_that_cannot_be_built_is_named_on_every_rank():
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, "wide", WIDTH)]

    def body(world):
        Pipeline(layers, mean_square, partition=[1, 1], world=world)

    for error in failures(2, body):
        assert isinstance(error, ModelError | PeerError) and "layers.1" in str(error)


def step(world, layers, inputs, targets, loss_fn=mean_square, **settings):
    pipe = Pipeline(layers, loss_fn, world=world, **{"microbatches": 2, **settings})
    data = inputs if pipe.needs_inputs else None, targets if pipe.needs_targets else None
    return pipe.step(*data)


def test_missing_inputs_on_the_first_stage_raise_on_every_rank():
    def body(world):
        step(world, linears(3), None, torch.ones(4, WIDTH))

    assert_all_report(failures(3, body), 0, DataError, "rank 0", "stage 0", "needs_inputs")


@pytest.mark.parametrize("size", [3, 5])
def test_wrong_number_of_targets_raises_on_every_rank(size):
    def body(world):
        step(world, linears(3), torch.ones(4, WIDTH), torch.ones(size, WIDTH))

    errors = failures(3, body)
    assert_all_report(errors, 2, ActionError, "targets", "expected 2 samples", "rank 2", "stage 2")


@pytest.mark.parametrize("inputs", [5, (), {"x": torch.ones(4), "y": torch.ones(3)}])
def test_inputs_without_a_common_batch_size_raise_on_every_rank(inputs):
    def body(world):
        step(world, linears(2), inputs, torch.ones(4, WIDTH))

    assert_all_report(failures(2, body), 0, DataError, "inputs", "dimension")


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda o, t: (o - t).square(), "(2, 4)"),
        (lambda o, t: 1.0, "float"),
        (lambda o, t: None, "NoneType"),
        (lambda o, t: ((o - t).square(), 2), "tuple"),
        (lambda o, t: (1, 2, 3), "tuple"),
    ],
)
def test_invalid_loss_value_raises_on_every_rank(loss_fn, got):
    def body(world):
        step(world, linears(2), torch.ones(4, WIDTH), torch.ones(4, WIDTH), loss_fn)

    errors = failures(2, body)
    assert_all_report(errors, 1, ActionError, "loss_fn", "(sum, weight)", got, "rank 1")


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("in the backward")


class Failing(nn.Linear):
    """A linear layer that fails on the micro-batch whose inputs are 7."""

    def __init__(self, where):
        super().__init__(WIDTH, WIDTH)
        self.where = where
        self.num_forwards = 0

    def forward(self, x):
        if x[0, 0] != 7:
            return super().forward(x)
        self.num_forwards += 1
        if self.where == "F" or (self.where == "R" and self.num_forwards == 2):
            raise ZeroDivisionError("in the forward")
        output = super().forward(x)
        return _FailingBackward.apply(output) if self.where == "B" else output


@pytest.mark.parametrize("where", ["F", "R", "B"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_layer_that_raises_is_named_on_every_rank(schedule, failing, where):
    inputs = torch.zeros(3, WIDTH)
    inputs[1] = 7

    def body(world):
        layers = [nn.Identity() for _ in range(3)]
        layers[failing] = Failing(where)
        layers[failing].weight.data.zero_()  # so that later layers never get 7
        settings = {"microbatches": 3, "schedule": schedule, "recompute": "always"}
        step(world, layers, inputs, inputs, partition=[1, 1, 1], **settings)

    errors = failures(3, body)
    place = f"rank {failing}, stage {failing}, micro-batch 1, action {failing}{where}1"
    words = "in the backward" if where == "B" else f"layers.{failing} (Failing): ZeroDivisionError"
    assert_all_report(errors, failing, ActionError, place, "ZeroDivisionError", words)
    assert f"-> {failing}{where}1 <-" in str(errors[failing])


def test_failure_in_one_replica_stops_the_others():
    def body(world):
        layers = [Failing("F"), nn.Identity()]
        inputs = torch.full((2, WIDTH), 7.0 if world.rank < 2 else 0.0)
        step(world, layers, inputs, inputs, replicas=2, microbatches=1)

    errors = failures(4, body)
    assert_all_report(errors, 0, ActionError, "rank 0, stage 0, micro-batch 0, action 0F0")


def test_non_finite_loss_is_reported_at_its_microbatch():
    inputs = torch.ones(8, WIDTH)
    inputs[5] = math.nan

    def body(world):
        pipe = Pipeline(linears(2), mean_square, replicas=2, microbatches=4, world=world)
        part = pipe.share(8)
        result = pipe.step(inputs[part], torch.zeros(8, WIDTH)[part])
        return result.loss, result.microbatch_losses

    for loss, losses in run_on_threads(4, body):
        assert math.isnan(loss)
        assert [math.isnan(value) for value in losses] == [i == 5 for i in range(8)]


def one_argument(output):
    return output.sum()


class OneArgument(nn.Module):
    forward = staticmethod(one_argument)


@pytest.mark.parametrize(
    "loss_fn",
    [
        torch.dist,  # has no signature
        F.mse_loss,  # has further parameters with defaults
        nn.MSELoss(),
        partial(lambda reduction, output, target: mean_square(output, target), "mean"),
        lambda *given: mean_square(*given),
    ],
)
def test_loss_callable_with_two_arguments_is_accepted(loss_fn):
    result = Pipeline(linears(2), loss_fn).step(*batch(4))
    assert math.isfinite(result.loss)


@pytest.mark.parametrize(
    ("args", "given", "words"),
    [
        ((), {}, r"all other arguments by keyword, got 0 positional"),
        ((linears(2),), {}, r"got 1 positional.*; write Pipeline\(layers, loss_fn"),
        ((linears(2), mean_square, 4), {}, r"got 3 positional"),
        ((linears(2), mean_square), {"loss_fn": mean_square}, r"loss_fn again"),
        ((linears(2), nn.MSELoss), {}, r"got the class MSELoss; create an instance: MSELoss\(\)"),
        ((linears(2), 3), {}, r"loss_fn: expected a function of \(output, target\), got int"),
        ((linears(2), one_argument), {}, r"\(output, target\), got a function of \(output\)"),
        ((linears(2), lambda o, t, weight: o), {}, r"of \(o, t, weight\); .* bind others"),
        ((linears(2), OneArgument()), {}, r"got a function of \(output\)"),
    ],
)
def test_invalid_constructor_arguments_are_rejected(args, given, words):
    """Regression: Python's message named internal functions; a class failed in the first step."""
    with pytest.raises(ConfigError, match=words):
        Pipeline(*args, **given)


def test_layers_and_loss_may_be_keyword_arguments():
    pipe = Pipeline(layers=linears(2), loss_fn=mean_square, microbatches=2)
    assert math.isfinite(pipe.step(*batch(4)).loss)


def test_unknown_keyword_on_one_rank_raises_on_every_rank():
    """Regression: it was raised before ranks could report errors to each other."""

    def body(world):
        wrong = {"schedul": "gpipe"} if world.rank == 1 else {}
        Pipeline(linears(2), mean_square, world=world, **wrong)

    errors = failures(3, body)
    assert_all_report(errors, 1, ConfigError, "unknown keyword schedul")


def test_timeline_raises_the_error_of_a_rank_that_failed_before_it():
    """Regression: ranks that gathered the timeline got a bare ConnectionError."""
    messages = []

    def body(world):
        pipe = Pipeline(linears(4), mean_square, microbatches=2, world=world)
        pipe.step(*batch(4))
        if world.rank == 1:
            raise DataError("mine")
        try:
            pipe.timeline()
        except PeerError as error:
            messages.append(str(error))
            raise

    with pytest.raises(DataError, match="mine"):
        run_on_threads(2, body)
    assert messages == ["rank 1: DataError: mine"]
