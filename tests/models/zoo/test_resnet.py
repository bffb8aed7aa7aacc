import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    build_layer,
    build_model,
    build_resnet,
    build_small_resnet,
    count_parameters,
    find_skips,
)

PUBLISHED = {
    "resnet50": (25_557_032, 183),
    "resnet101": (44_549_160, 370),  # layers: as torchgpipe cuts it
    "resnet152": (60_192_808, 557),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str):
    count, num_layers = PUBLISHED[name]
    layers = build_model(name)
    assert (count_parameters(layers), len(layers)) == (count, num_layers)
    assert count_parameters(build_model(name, num_classes=10)) == count - 990 * 2049


def conv(weights: Iterator[Tensor], x: Tensor, stride: int = 1) -> Tensor:
    weight = next(weights)
    return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)


def norm(weights: Iterator[Tensor], x: Tensor) -> Tensor:
    """Normalize each channel over the batch, by the definition of BatchNorm."""
    scale, shift = next(weights), next(weights)
    centred = x - x.mean((0, 2, 3), keepdim=True)
    deviation = (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return centred / deviation * scale[:, None, None] + shift[:, None, None]


def block(weights: Iterator[Tensor], x: Tensor, kernels: Sequence[tuple[int, int]]) -> Tensor:
    """Compute a residual block, given kernel width and stride of each convolution."""
    y = x
    for place, (_, stride) in enumerate(kernels):
        y = norm(weights, conv(weights, y, stride))
        if place < len(kernels) - 1:
            y = y.clamp(min=0)
    stride = math.prod(stride for _, stride in kernels)
    if stride > 1 or x.shape[1] != y.shape[1]:
        x = norm(weights, conv(weights, x, stride))
    return (x + y).clamp(min=0)


def linear(weights: Iterator[Tensor], x: Tensor) -> Tensor:
    return x.mean((2, 3)) @ next(weights).T + next(weights)


def test_equals_resnet_written_out(assert_equals_plain):
    def plain(weights: Iterator[Tensor], x: Tensor) -> Tensor:
        x = norm(weights, conv(weights, x, 2)).clamp(min=0)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-math.inf), 3, 2)
        for group, number in enumerate([2, 1]):
            for index in range(number):
                stride = 2 if (group, index) == (1, 0) else 1
                x = block(weights, x, [(0, 1), (0, stride), (0, 1)])
        return linear(weights, x)

    layers = build_resnet([2, 1], num_classes=5, in_channels=2, width=4)
    assert len(layers) == 7 + 11 * 3
    assert assert_equals_plain(layers, plain, (3, 2, 33, 26)).shape == (3, 5)


@pytest.mark.parametrize("side", [8, 28])
def test_small_one_equals_its_blocks_written_out(assert_equals_plain, side: int):
    def plain(weights: Iterator[Tensor], x: Tensor) -> Tensor:
        x = norm(weights, conv(weights, x)).clamp(min=0)
        for group, number in enumerate([1, 2, 1]):
            for index in range(number):
                x = block(weights, x, [(0, 2 if group and not index else 1), (0, 1)])
        return linear(weights, x)

    layers = build_small_resnet([1, 2, 1], width=4)
    assert len(layers) == 6 + 8 * 4
    assert assert_equals_plain(layers, plain, (3, 1, side, side)).shape == (3, 10)


@pytest.mark.parametrize("name", ["resnet50", "resnet_small"])
def test_shortcuts_stay_within_blocks(assert_travels, name: str):
    """A stage boundary may be anywhere, and no skip is longer than its block."""
    layers = build_model(name)
    length = 11 if name == "resnet50" else 8
    skips = find_skips(layers)
    assert len(skips) == layers.count(build_model(name)[skips[0].source])
    assert {skip.destination - skip.source for skip in skips} == {length - 2}
    assert_travels(layers)


def test_initialisation_is_torchvisions():
    layers = build_resnet([1], width=64, zero_init_residual=True)
    stem, last = (build_layer(layers[i], index=i, seed=0) for i in (0, 12))
    assert stem.weight.std().item() == pytest.approx(math.sqrt(2 / (49 * 64)), rel=0.05)
    assert isinstance(last, nn.BatchNorm2d) and not last.weight.any() and stem.bias is None
    plain = build_resnet([1], width=64)
    assert build_layer(plain[12], index=12, seed=0).weight.all()
    assert count_parameters(plain) == count_parameters(layers)


def test_a_zeroed_block_is_the_identity_at_first():
    layers = build_resnet([2], width=4, zero_init_residual=True)
    block_layers = [build_layer(layers[i], index=i, seed=0) for i in range(16, 24)]
    x = torch.randn(2, 16, 5, 5)
    assert not nn.Sequential(*block_layers)(x).any()


@pytest.mark.parametrize(
    ("build", "change", "message"),
    [
        (build_resnet, {"num_blocks": []}, r"resnet: num_blocks is empty"),
        (build_resnet, {"num_blocks": [1, 0]}, r"resnet: num_blocks\[1\] too small.*got 0"),
        (build_small_resnet, {"num_blocks": [0]}, r"resnet_small: num_blocks\[0\] too small"),
        (build_small_resnet, {"width": 0}, r"resnet_small: width too small"),
    ],
)
def test_impossible_sizes_are_refused(build, change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build(**{"num_blocks": [1], **change})
