from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import build_model, build_unet, count_parameters, find_skips

PUBLISHED = {
    (5, 64): (232_687_328, 241),
    (6, 72): (362_157_516, 285),
    (11, 128): (2_213_834_176, 505),
    (24, 128): (4_993_859_008, 1077),
    (24, 160): (7_802_903_600, 1077),
    (48, 160): (15_822_206_000, 2133),
}


@pytest.mark.parametrize("size", PUBLISHED, ids=str)
def test_published_sizes(size: tuple[int, int]):
    num_convs, base_channels = size
    layers = build_model("unet", num_convs=num_convs, base_channels=base_channels)
    assert (count_parameters(layers), len(layers)) == PUBLISHED[size]


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("num_convs", [1, 2, 4])
def test_every_level_has_a_long_skip(assert_travels, depth: int, num_convs: int):
    layers = build_unet(num_convs, 4, depth=depth)
    assert len(layers) == 4 * depth + 1 + (8 * depth + 4) * num_convs
    skips = find_skips(layers)
    assert len(skips) == depth
    assert [skip.source for skip in skips] == sorted(skip.source for skip in skips)
    # Skips are nested: the first level's skip leads to the last decoder.
    assert sorted((skip.destination for skip in skips), reverse=True) == [
        skip.destination for skip in skips
    ]
    assert_travels(layers)


def convs(weights: Iterator[Tensor], x: Tensor, number: int, dropout: float) -> Tensor:
    for _ in range(number):
        x = F.dropout2d(F.conv2d(x, next(weights), padding=1), dropout)
        centred = x - x.mean((2, 3), keepdim=True)
        x = centred / (centred.square().mean((2, 3), keepdim=True) + 1e-5).sqrt()
        x = torch.where(x > 0, x, x / 100)
    return x


def level(weights: Iterator[Tensor], x: Tensor, depth: int, number: int, dropout: float) -> Tensor:
    """Compute a level and all levels below it; the output has the size of the input."""
    x = convs(weights, x, number, dropout)
    if depth == 0:
        return x
    below = level(weights, F.max_pool2d(x, 2), depth - 1, number, dropout)
    wider = below.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    joined = torch.zeros(len(x), below.shape[1] + x.shape[1], *x.shape[2:], dtype=x.dtype)
    joined[:, : below.shape[1], : wider.shape[2], : wider.shape[3]] = wider
    joined[:, below.shape[1] :] = x
    return convs(weights, joined, number, dropout)


@pytest.mark.parametrize(
    ("number", "depth", "dropout", "size"),
    [(1, 2, 0.0, (8, 8)), (2, 2, 0.3, (13, 18)), (3, 1, 0.1, (7, 5)), (1, 5, 0.1, (64, 95))],
)
def test_equals_unet_written_out(
    assert_equals_plain, number: int, depth: int, dropout: float, size: tuple[int, int]
):
    def plain(weights: Iterator[Tensor], x: Tensor) -> Tensor:
        return F.conv2d(level(weights, x, depth, number, dropout), next(weights))

    layers = build_unet(number, 4, in_channels=2, num_classes=3, depth=depth, dropout=dropout)
    assert assert_equals_plain(layers, plain, (2, 2, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_convs": 0}, r"unet: num_convs too small"),
        ({"depth": 0}, r"unet: depth too small"),
        ({"base_channels": 7}, r"unet: base_channels must be even.*got 7; use 8"),
        ({"dropout": 1.0}, r"unet: dropout out of range"),
        ({"num_classes": 0}, r"unet: num_classes too small"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_unet(**change)


def test_more_levels_than_a_picture_can_have_are_refused():
    """Regression: an impossible depth was counted until memory was exhausted."""
    with pytest.raises(ModelError, match=r"depth .*at most 24"):
        build_unet(depth=2**63 - 1)
