import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    build_abstract,
    build_alexnet,
    build_layer,
    build_model,
    count_parameters,
)


def test_count_is_torchvisions():
    assert count_parameters(build_model("alexnet")) == 61_100_840
    assert count_parameters(build_model("alexnet", num_classes=10)) == 61_100_840 - 990 * 4097


def test_shapes_are_torchvisions():
    layers = build_model("alexnet")
    x = torch.zeros(1, 3, 224, 224, device="meta")
    sides = []
    for index, layer in enumerate(layers):
        x = build_abstract(layer, index=index)(x)
        sides += [x.shape[-1]] * (layer.name in ("Conv2d", "MaxPool2d"))
    assert sides == [55, 27, 27, 13, 13, 13, 13, 6]
    assert x.shape == (1, 1000)


def test_equals_alexnet_written_out():
    specs = build_alexnet(num_classes=5, in_channels=2, width=4, hidden=8, dropout=0.0)
    layers = [build_layer(spec, index=i, seed=0).double() for i, spec in enumerate(specs)]
    images = torch.randn(3, 2, 95, 70, generator=torch.Generator().manual_seed(0)).double()
    p = list(nn.Sequential(*layers).parameters())
    x = F.max_pool2d(F.conv2d(images, p[0], p[1], stride=4, padding=2).relu(), 3, 2)
    x = F.max_pool2d(F.conv2d(x, p[2], p[3], padding=2).relu(), 3, 2)
    x = F.conv2d(x, p[4], p[5], padding=1).relu()
    x = F.conv2d(x, p[6], p[7], padding=1).relu()
    x = F.max_pool2d(F.conv2d(x, p[8], p[9], padding=1).relu(), 3, 2)
    x = F.adaptive_avg_pool2d(x, 6).reshape(3, -1)
    x = (x @ p[10].T + p[11]).relu()
    x = (x @ p[12].T + p[13]).relu()
    out = nn.Sequential(*layers)(images)
    torch.testing.assert_close(out, x @ p[14].T + p[15], rtol=1e-10, atol=1e-10)
    assert len(p) == 16 and out.std(0).min() > 0


def test_dropout_stands_before_both_hidden_layers():
    names = [each.name for each in build_model("alexnet")]
    assert names[-7:] == ["Dropout", "Linear", "ReLU", "Dropout", "Linear", "ReLU", "Linear"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, r"alexnet: width too small.*got 0"),
        ({"dropout": -0.1}, r"alexnet: dropout out of range"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_alexnet(**change)
