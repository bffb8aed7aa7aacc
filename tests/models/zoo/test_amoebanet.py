from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import build_amoebanet_d, build_layer, build_model, count_parameters

PUBLISHED = {
    (18, 208): 81_505_540,
    (18, 256): 122_470_120,
    (18, 416): 319_024_120,
    (18, 512): 481_268_200,
    (18, 544): 542_734_840,
    (36, 544): 1_055_832_376,
    (72, 512): 1_844_858_344,
}


@pytest.mark.parametrize("size", PUBLISHED, ids=str)
def test_published_sizes(size: tuple[int, int]):
    num_layers, num_filters = size
    layers = build_model("amoebanet_d", num_layers=num_layers, num_filters=num_filters)
    assert count_parameters(layers) == PUBLISHED[size]
    assert len(layers) == num_layers + 6


# Input state and operation of both terms of each sum, then the output states.
NORMAL = (
    [
        *[(1, "1x1"), (1, "average"), (1, "none"), (0, "1x7"), (0, "1x1"), (0, "1x7")],
        *[(2, "average"), (2, "none"), (1, "average"), (5, "1x1")],
    ],
    [0, 3, 4, 6],
)
REDUCTION = (
    [
        *[(0, "max"), (0, "average"), (2, "none"), (1, "3x3"), (2, "1x7"), (2, "average")],
        *[(3, "none"), (1, "max"), (2, "average"), (3, "1x1")],
    ],
    [4, 5, 6],
)


def unit(weights: Iterator[Tensor], x: Tensor, stride: tuple[int, int] = (1, 1)) -> Tensor:
    weight = next(weights)
    padding = [side // 2 for side in weight.shape[2:]]
    x = F.conv2d(x.clamp(min=0), weight, stride=stride, padding=padding)
    return F.batch_norm(x, None, None, next(weights), next(weights), training=True)


def average(x: Tensor, stride: int) -> Tensor:
    """Return the average over those of 3 x 3 pixels that are within the image."""
    ones = torch.ones_like(x)
    sums, counts = (
        F.pad(each, (1, 1, 1, 1)).unfold(2, 3, stride).unfold(3, 3, stride).sum((-1, -2))
        for each in (x, ones)
    )
    return sums / counts


def operate(weights: Iterator[Tensor], operation: str, x: Tensor, stride: int) -> Tensor:
    match operation:
        case "none":
            return x
        case "average":
            return average(x, stride)
        case "max":
            return x.unfold(2, 2, stride).unfold(3, 2, stride).amax((-1, -2))
        case "1x1":
            return unit(weights, x, (stride, stride))
        case "3x3":
            return unit(weights, unit(weights, unit(weights, x), (stride, stride)))
    x = unit(weights, unit(weights, x), (1, stride))
    return unit(weights, unit(weights, x, (stride, 1)))


def factorized(weights: Iterator[Tensor], x: Tensor) -> Tensor:
    x = x.clamp(min=0)
    even, odd = next(weights), next(weights)
    shifted = torch.zeros_like(x)
    shifted[:, :, :-1, :-1] = x[:, :, 1:, 1:]
    halves = [F.conv2d(x[..., ::2, ::2], even), F.conv2d(shifted[..., ::2, ::2], odd)]
    both = torch.cat(halves, 1)
    return F.batch_norm(both, None, None, next(weights), next(weights), training=True)


def plain_of(num_normal: int, channels: int):
    """Return a plain AmoebaNet-D with `num_normal` normal cells in each group."""

    def plain(weights: Iterator[Tensor], x: Tensor) -> Tensor:
        x = F.conv2d(x.clamp(min=0), next(weights), stride=2, padding=1)
        x = F.batch_norm(x, None, None, next(weights), next(weights), training=True)
        before, last, width = x, x, channels
        group = [NORMAL] * num_normal
        for sums, given in [REDUCTION, REDUCTION, *group, REDUCTION, *group, REDUCTION, *group]:
            width, stride = (2 * width, 2) if given == REDUCTION[1] else (width, 1)
            states = [unit(weights, last)]
            if before.shape[2] != last.shape[2]:
                states.append(factorized(weights, before))
            else:
                states.append(before if before.shape[1] == width else unit(weights, before))
            for (a, one), (b, other) in zip(sums[::2], sums[1::2], strict=True):
                left = operate(weights, one, states[a], stride if a < 2 else 1)
                states.append(left + operate(weights, other, states[b], stride if b < 2 else 1))
            before, last = last, torch.cat([states[i] for i in given], 1)
        return last.mean((2, 3)) @ next(weights).T + next(weights)

    return plain


@pytest.mark.parametrize("num_normal", [1, 2])
def test_equals_amoebanet_written_out(assert_equals_plain, num_normal: int):
    layers = build_amoebanet_d(3 * num_normal, 16, num_classes=5, in_channels=2)
    assert len(layers) == 3 * num_normal + 6
    out = assert_equals_plain(layers, plain_of(num_normal, 4), (2, 2, 64, 32))
    assert out.shape == (2, 5)


def test_specs_travel(assert_travels):
    assert_travels(build_model("amoebanet_d"))


def test_a_cell_passes_on_what_it_was_given():
    layers = build_amoebanet_d(3, 16)
    first, second = (build_layer(layers[i], index=i, seed=0) for i in (1, 2))
    stem = torch.randn(2, 4, 16, 16)
    output, given = first(stem)
    assert given is stem
    assert output.shape == (2, 3 * 8, 8, 8)
    assert second((output, given))[1] is output


@pytest.mark.parametrize("shape", [(2, 3, 48, 32), (2, 3, 32, 33)])
def test_images_that_do_not_halve_are_refused(shape: tuple[int, ...]):
    stem = build_layer(build_amoebanet_d(3, 16)[0], index=0, seed=0)
    with pytest.raises(ModelError, match=r"divisible by 32, got \[2, 3, "):
        stem(torch.zeros(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 19}, r"amoebanet_d: num_layers must be a multiple of 3.*got 19; use 18"),
        ({"num_layers": 0}, r"amoebanet_d: num_layers must be a multiple of 3.*got 0; use 3"),
        (
            {"num_filters": 210},
            r"amoebanet_d: num_filters must be a multiple of 4.*got 210; use 208",
        ),
        ({"num_filters": 4}, r"amoebanet_d: num_filters must be a multiple of 4.*got 4; use 8"),
        ({"num_classes": 0}, r"amoebanet_d: num_classes too small"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_amoebanet_d(**change)
