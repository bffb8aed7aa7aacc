import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import build_layer, build_model, build_vgg, count_parameters
from gpipe_hpc.models.zoo.vgg import VGGConv

# Numbers of channels in torchvision's configurations D and E; 0 is a pooling.
SIXTEEN = [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0]
NINETEEN = [64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4, 0]


@pytest.mark.parametrize(
    ("name", "table", "count"), [("vgg16", SIXTEEN, 138_357_544), ("vgg19", NINETEEN, 143_667_240)]
)
def test_published_table_and_count(name: str, table: list[int], count: int):
    layers = build_model(name)
    features = [each for each in layers if each.factory in (VGGConv, nn.MaxPool2d)]
    assert [each.args[1] if each.factory is VGGConv else 0 for each in features] == table
    assert count_parameters(layers) == count
    assert count_parameters(build_model(name, num_classes=10)) == count - 990 * 4097


def built(**sizes: object) -> list[nn.Module]:
    layers = build_vgg(**{"num_classes": 5, "width": 2, "hidden": 8, "dropout": 0.0, **sizes})
    return [build_layer(layer, index=i, seed=0).double() for i, layer in enumerate(layers)]


def average(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return averages over windows that cover the image, by the definition of adaptive pooling."""
    height, width = images.shape[-2:]

    def window(index: int, length: int) -> slice:
        return slice(index * length // size, math.ceil((index + 1) * length / size))

    rows = [
        [images[..., window(i, height), window(j, width)].mean((-1, -2)) for j in range(size)]
        for i in range(size)
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def plain_forward(
    layers: list[nn.Module], num_convs: list[int], images: torch.Tensor
) -> torch.Tensor:
    """Compute VGG with plain operations and the weights of the layers."""
    weighted = iter([each for each in layers if list(each.parameters())])
    x = images
    for number in num_convs:
        for conv in [next(weighted) for _ in range(number)]:
            x = F.conv2d(x, conv.weight, conv.bias, padding=1).clamp(min=0)
        x = x[..., : x.shape[-2] // 2 * 2, : x.shape[-1] // 2 * 2]
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))
    x = average(x, 7).reshape(len(x), -1)
    first, second, last = weighted
    x = (x @ first.weight.T + first.bias).clamp(min=0)
    x = (x @ second.weight.T + second.bias).clamp(min=0)
    return x @ last.weight.T + last.bias


@pytest.mark.parametrize(
    ("num_convs", "shape"),
    [([2, 2, 3, 3, 3], (2, 3, 32, 47)), ([1, 2, 1], (3, 1, 80, 67))],
    ids=["vgg16", "pooled"],
)
def test_equals_vgg_written_out(num_convs: list[int], shape: tuple[int, ...]):
    layers = built(num_convs=num_convs, in_channels=shape[1])
    images = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = nn.Sequential(*layers)(100 * images)
    assert out.shape == (shape[0], 5)
    assert out.std(0).min() > 0
    expected = plain_forward(layers, num_convs, 100 * images)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_classifier_drops_after_both_hidden_layers():
    names = [each.name for each in build_model("vgg16", dropout=0.3)][-7:]
    assert names == ["VGGLinear", "ReLU", "Dropout"] * 2 + ["VGGLinear"]
    assert [each.args for each in build_model("vgg16", dropout=0.3) if each.name == "Dropout"] == [
        (0.3,),
        (0.3,),
    ]


def test_initialisation_is_torchvisions():
    layers = build_vgg([1, 1], width=32, hidden=300)
    conv, linear = (build_layer(layers[i], index=i, seed=0) for i in (3, 8))
    assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.03)
    assert linear.weight.std().item() == pytest.approx(0.01, rel=0.03)
    assert not conv.bias.any() and not linear.bias.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_convs": []}, r"vgg: num_convs is empty"),
        ({"num_convs": [1, 0]}, r"vgg: num_convs\[1\] too small.*got 0"),
        ({"num_classes": 0}, r"vgg: num_classes too small"),
        ({"dropout": 1.0}, r"vgg: dropout out of range"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_vgg(**{"num_convs": [1], **change})
