"""Squared norms of each micro-batch's gradients, measured while gradients accumulate."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.gradient_norms import CopySquaredNorms, GradientParts, MicrobatchSquaredNorms
from tests.support import batch, square_sum

WIDTH, NUM = 4, 5


class WeightUsedTwice(nn.Module):
    """Use a weight in two places, of which a split backward leaves only one to W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, inputs):
        return self.norm(nn.functional.linear(inputs, self.weight) + inputs * self.weight[0])


def layers() -> list[LayerSpec]:
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    return [linear, LayerSpec(WeightUsedTwice), LayerSpec(nn.Tanh), linear]


def expected(inputs, targets) -> list[float]:
    """Return the squared norm of each micro-batch's gradients, from a step on it alone."""
    found = []
    pieces = zip(inputs.tensor_split(NUM), targets.tensor_split(NUM), strict=True)
    for piece, wanted in pieces:
        pipe = Pipeline(layers(), square_sum)
        pipe.step(piece, wanted)
        share = len(piece) / len(inputs)
        found.append(share**2 * sum(p.grad.square().sum().item() for p in pipe.parameters()))
    return found


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (1, {"recompute": "always"}),
        (2, {"stages": 2}),
        (2, {"stages": 2, "schedule": "one_f_one_b"}),
        (2, {"stages": 2, "schedule": "zb_h1"}),
        (2, {"stages": 2, "schedule": "zb_h1", "recompute": "always"}),
        (2, {"stages": 2, "schedule": "zb_v", "recompute": "never"}),
    ],
)
def test_squared_norms_of_microbatches_equal_those_of_separate_steps(ranks, options):
    """A parameter may get gradients in I and in W. Micro-batches have 5, 5, 4, 4 and 4 samples."""
    inputs, targets = batch(22, dtype=torch.float64)

    def body(world):
        pipe = Pipeline(
            layers(),
            square_sum,
            noise_over="microbatches",
            microbatches=NUM,
            partition="uniform",
            world=world,
            **options,
        )
        found = []
        for _ in range(2):  # the second step begins with existing gradients
            result = pipe.step(inputs, targets)
            found.append(result.parts.squares.tolist())
        assert found[0] == found[1]
        return found[0], result.parts.mean_square(), pipe.grad_square()

    for squares, (mean, number), total in run_on_threads(ranks, body):
        expected_squares = expected(inputs, targets)
        assert squares == pytest.approx(expected_squares, rel=1e-10)
        shares = [5 / 22, 5 / 22, 4 / 22, 4 / 22, 4 / 22]
        by_hand = sum(w / a for w, a in zip(expected_squares, shares, strict=True))
        assert mean == pytest.approx(by_hand, rel=1e-10) and number == NUM
        assert 0 < total <= mean * (1 + 1e-10), "the square of a mean is at most the mean square"


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"replicas": 2, "microbatches": 2}),
        (4, {"stages": 2, "replicas": 2, "microbatches": 2}),
        (2, {"stages": 2, "microbatches": 4, "schedule": "chimera"}),
        (4, {"stages": 2, "replicas": 2, "microbatches": 2, "schedule": "chimera"}),
    ],
)
def test_squared_norms_of_copies_equal_those_of_steps_on_their_parts(ranks, options):
    """The two directions of a mirrored schedule have copies of each stage on different ranks."""
    inputs, targets = batch(22, dtype=torch.float64)

    def body(world):
        pipe = Pipeline(
            layers(), square_sum, noise_over="replicas", partition="uniform", world=world, **options
        )
        own = pipe.share(len(inputs))
        parts = pipe.step(inputs[own], targets[own]).parts
        return parts.squares.tolist(), parts.part_of

    for squares, part_of in run_on_threads(ranks, body):
        pieces = torch.arange(len(inputs)).tensor_split(4)
        expected_squares = [0.0] * 4
        for part in set(part_of):
            samples = torch.cat([each for i, each in enumerate(pieces) if part_of[i] == part])
            pipe = Pipeline(layers(), square_sum)
            pipe.step(inputs[samples], targets[samples])
            share = len(samples) / len(inputs)
            square = sum(p.grad.square().sum().item() for p in pipe.parameters())
            expected_squares[part] = share**2 * square
        assert squares == pytest.approx(expected_squares, rel=1e-10)
        assert len(set(part_of)) >= 2


def test_frozen_parameter_adds_nothing_to_squared_norms():
    inputs, targets = batch(22, dtype=torch.float64)
    found = []
    for is_frozen in (False, True):
        pipe = Pipeline(layers(), square_sum, noise_over="microbatches", microbatches=NUM)
        pipe.step(inputs, targets)
        for name, parameter in pipe.named_parameters():
            if name.startswith("layers.1."):
                parameter.requires_grad_(not is_frozen)
        result = pipe.step(inputs, targets)
        found.append(result.parts.squares.sum().item())
    assert 0 < found[1] < found[0]


def test_unused_parameter_adds_nothing_to_norm_of_microbatch():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    squares = MicrobatchSquaredNorms(parameters)
    squares.begin()
    parameters[0].grad = torch.tensor([1.0, 2.0, 2.0])
    squares.note(0, is_last=True)
    parameters[1].grad = torch.tensor([3.0, 4.0])
    squares.note(1, is_last=True)
    parameters[0].grad.add_(1.0)
    squares.note(2, is_last=True)
    assert {m: s.item() for m, s in squares.take().items()} == pytest.approx(
        {0: 9.0, 1: 25.0, 2: 3.0}
    )


def reduce_bucket(measured, parameters):
    """Reduce gradients as a bucket does: the sum over ranks replaces them."""
    measured.before_reduction(parameters)
    for parameter in parameters:
        parameter.grad.mul_(100.0)


def test_gradient_reduced_in_last_backward_counts_for_its_microbatch():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    squares = MicrobatchSquaredNorms(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.zeros(2)
        squares.begin()
        for parameter in parameters:
            parameter.grad.add_(1.0)
        squares.note(0, is_last=True)
        parameters[2].grad.add_(3.0)
        reduce_bucket(squares, parameters[2:])
        parameters[1].grad.add_(2.0)
        parameters[0].grad.add_(1.0)
        reduce_bucket(squares, parameters[1:2])
        squares.note(1, is_last=True)
        reduce_bucket(squares, parameters[:1])
        found = {m: s.item() for m, s in squares.take().items()}
        assert found == pytest.approx({0: 6.0, 1: 2 * (9.0 + 4.0 + 1.0)})


def test_gradient_reduced_in_w_includes_its_part_from_i():
    parameter = nn.Parameter(torch.zeros(1))
    squares = MicrobatchSquaredNorms([parameter])
    parameter.grad = torch.zeros(1)
    squares.begin()
    parameter.grad.add_(1.0)
    squares.note(0, is_last=False)
    parameter.grad.add_(5.0)  # of another micro-batch, between the two
    squares.note(1, is_last=True)
    parameter.grad.add_(2.0)
    reduce_bucket(squares, [parameter])
    squares.note(0, is_last=True)
    assert {m: s.item() for m, s in squares.take().items()} == pytest.approx({0: 9.0, 1: 25.0})


def test_squared_norms_of_buckets_add_up_for_a_copy():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    squares = CopySquaredNorms(parameters, 4)
    for _ in range(2):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full((2,), float(number))
        parameters[0].grad = None
        squares.begin()
        squares.before_reduction([])
        for parameter in parameters[::-1]:
            squares.before_reduction([parameter])
        assert {m: s.item() for m, s in squares.take().items()} == pytest.approx({4: 10.0})


def test_noise_estimates_are_unbiased_for_parts_of_unequal_weight():
    """Compares means over 4,000 draws of 13 samples with true values; the tolerance is 6 sigma."""
    generator = torch.Generator().manual_seed(0)
    sizes, deviation, mean = (1, 2, 3, 7), 2.0, 1.5
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    part_of = tuple(s for s, size in zip(starts, sizes, strict=True) for _ in range(size))
    weights = torch.ones(13, dtype=torch.float64)
    variances, squares = [], []
    for _ in range(4000):
        draws = mean + deviation * torch.randn(13, generator=generator, dtype=torch.float64)
        measured = torch.zeros(13, dtype=torch.float64)
        for start, size in zip(starts, sizes, strict=True):
            measured[start] = (draws[start : start + size].sum() / 13).square()
        found, number = GradientParts.of(measured, weights, part_of, HostDevice()).mean_square()
        total = draws.mean().square().item()
        variances.append((found - total) / (number - 1))
        squares.append(total - variances[-1])
    assert number == 4
    for drawn, true_value in ((variances, deviation**2 / 13), (squares, mean**2)):
        values = torch.tensor(drawn)
        assert abs(values.mean() - true_value) < 6 * values.std() / 4000**0.5
        assert values.std() / 4000**0.5 < 0.02 * max(true_value, 0.5), (
            "too few draws for a precise estimate"
        )
