import math
from collections.abc import Iterator

import pytest
import torch.nn.functional as F
from torch import Tensor

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    build_layer,
    build_model,
    build_resnet_v2,
    count_parameters,
    find_skips,
)


@pytest.mark.parametrize(
    ("name", "form", "count"),
    [
        ("resnet110_v2", "keras", 3_302_442),
        ("resnet1001_v2", "keras", 30_347_658),
        ("resnet1001_v2", "he", 10_327_706),
    ],
)
def test_published_counts(name: str, form: str, count: int):
    layers = build_model(name, form=form)
    assert count_parameters(layers) == count
    depth = int(name.removeprefix("resnet").removesuffix("_v2"))
    assert len(find_skips(layers)) == (depth - 2) // 3
    convs = [each for each in layers if each.name == "PreActConv"]
    assert len(convs) == depth - 1  # and the linear layer


def norm_relu(weights: Iterator[Tensor], x: Tensor) -> Tensor:
    weight, bias = next(weights), next(weights)
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def plain_of(form: str, num_blocks: int):
    """Return the forward of a plain ResNet-v2, as in Keras' example or in the paper's code."""

    def conv(weights: Iterator[Tensor], x: Tensor, stride: int = 1) -> Tensor:
        weight = next(weights)
        bias = next(weights) if form == "keras" else None
        return F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2)

    def plain(weights: Iterator[Tensor], x: Tensor) -> Tensor:
        x = conv(weights, x)
        if form == "keras":
            x = norm_relu(weights, x)
        for group in range(3):
            for block in range(num_blocks):
                stride = 2 if group > 0 and block == 0 else 1
                y = x
                if form == "he" or (group, block) != (0, 0):
                    y = norm_relu(weights, y)
                if form == "he" and block == 0:
                    x = y
                y = conv(weights, y, stride)
                y = conv(weights, norm_relu(weights, y))
                y = conv(weights, norm_relu(weights, y))
                x = y + (conv(weights, x, stride) if block == 0 else x)
        return norm_relu(weights, x).mean((2, 3)) @ next(weights).T + next(weights)

    return plain


@pytest.mark.parametrize("form", ["keras", "he"])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_equals_the_form_written_out(assert_equals_plain, form: str, num_blocks: int):
    layers = build_resnet_v2(9 * num_blocks + 2, 4, in_channels=2, width=4, form=form)
    shape = assert_equals_plain(layers, plain_of(form, num_blocks), (3, 2, 17, 12)).shape
    assert shape == (3, 4)


def test_specs_travel(assert_travels):
    assert_travels(build_model("resnet110_v2"))


def test_initialisation_is_hes():
    layers = build_resnet_v2(11, width=64)
    conv = build_layer(layers[7], index=7, seed=0)
    assert conv.kernel_size == (3, 3)
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.03)
    assert not conv.bias.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 5000}, r"resnet_v2: depth must be 9 n \+ 2.*got 5000; use 4997"),
        ({"depth": 2}, r"resnet_v2: depth must be 9 n .*got 2; use 11"),
        ({"depth": -7}, r"resnet_v2: depth must be 9 n .*got -7; use 11"),
        ({"form": "mxnet"}, r"resnet_v2: unknown form.*keras, he.*got 'mxnet'"),
        ({"width": 0}, r"resnet_v2: width too small"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_resnet_v2(**{"depth": 11, **change})
