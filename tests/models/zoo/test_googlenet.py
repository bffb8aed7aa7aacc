from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    build_googlenet,
    build_layer,
    build_model,
    count_parameters,
    find_skips,
    run_layers,
)


@pytest.mark.parametrize(
    ("form", "auxiliary", "count"),
    [
        ("torchvision", False, 6_624_904),
        ("torchvision", True, 13_004_888),
        ("caffe", False, 6_998_552),
        ("caffe", True, 13_378_280),
    ],
)
def test_published_counts(form: str, auxiliary: bool, count: int):
    layers = build_model("googlenet", form=form, auxiliary=auxiliary)
    assert count_parameters(layers) == count
    assert len(find_skips(layers)) == (2 if auxiliary else 0)


def plain_of(form: str, auxiliary: bool, dropout: float):
    """Return the forward function of a plain GoogLeNet."""

    def unit(weights: Iterator[Tensor], x: Tensor, stride: int = 1) -> Tensor:
        weight = next(weights)
        bias = next(weights) if form == "caffe" else None
        x = F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2)
        if form == "torchvision":
            x = F.batch_norm(x, None, None, next(weights), next(weights), True, eps=1e-3)
        return x.clamp(min=0)

    def pool(x: Tensor, side: int = 3) -> Tensor:
        return F.max_pool2d(x, side, 2, ceil_mode=True)

    def response(x: Tensor) -> Tensor:
        if form == "torchvision":
            return x
        squares = F.pad(x.square(), (0, 0, 0, 0, 2, 2)).unfold(1, 5, 1).mean(-1)
        return x / (1 + 1e-4 * squares) ** 0.75

    def inception(weights: Iterator[Tensor], x: Tensor) -> Tensor:
        one = unit(weights, x)
        three = unit(weights, unit(weights, x))
        five = unit(weights, unit(weights, x))
        pooled = unit(weights, F.max_pool2d(x, 3, 1, 1))
        return torch.cat([one, three, five, pooled], 1)

    def head(weights: Iterator[Tensor], x: Tensor) -> Tensor:
        x = unit(weights, F.adaptive_avg_pool2d(x, 4)).flatten(1)
        x = (x @ next(weights).T + next(weights)).clamp(min=0)
        return F.dropout(x, 0.7) @ next(weights).T + next(weights)

    def plain(weights: Iterator[Tensor], x: Tensor) -> Tensor | tuple[Tensor, ...]:
        x = response(pool(unit(weights, x, 2)))
        x = pool(response(unit(weights, unit(weights, x))))
        x = pool(inception(weights, inception(weights, x)))
        heads = []
        for module in "abcde":
            x = inception(weights, x)
            if auxiliary and module in "ad":
                heads.append(head(weights, x))
        x = pool(x, 3 if form == "caffe" else 2)
        x = inception(weights, inception(weights, x))
        x = F.dropout(x.mean((2, 3)), dropout) @ next(weights).T + next(weights)
        return (x, *heads) if auxiliary else x

    return plain


@pytest.mark.parametrize("form", ["torchvision", "caffe"])
@pytest.mark.parametrize("auxiliary", [False, True])
def test_equals_googlenet_written_out(assert_equals_plain, form: str, auxiliary: bool):
    layers = build_googlenet(5, 2, width=16, dropout=0.1, auxiliary=auxiliary, form=form)
    output = assert_equals_plain(layers, plain_of(form, auxiliary, 0.1), (3, 2, 45, 64))
    logits = output if auxiliary else [output]
    assert [each.shape for each in logits] == [(3, 5)] * (3 if auxiliary else 1)


def test_evaluation_gives_the_main_logits_alone():
    layers = build_googlenet(5, width=8, auxiliary=True)
    modules = {i: build_layer(spec, index=i, seed=0).eval() for i, spec in enumerate(layers)}
    images = torch.randn(2, 3, 64, 64)
    logits = run_layers(modules, layers, images)
    assert logits.shape == (2, 5)
    for module in modules.values():
        module.train()
    training = run_layers(modules, layers, images)
    assert [each.shape for each in training] == [(2, 5)] * 3


def test_specs_travel(assert_travels):
    assert_travels(build_model("googlenet", auxiliary=True))


def test_initialisation_is_torchvisions():
    layers = build_googlenet()
    stem = build_layer(layers[0], index=0, seed=0)
    # Normal with std 0.01, truncated at two standard deviations.
    assert stem.weight.abs().max() <= 0.02
    assert stem.weight.std().item() == pytest.approx(0.0088, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 12}, r"googlenet: width must be a multiple of 8.*got 12; use 16"),
        ({"width": 0}, r"googlenet: width too small"),
        ({"form": "keras"}, r"googlenet: unknown form.*torchvision, caffe.*got 'keras'"),
        ({"dropout": 1.0}, r"googlenet: dropout out of range"),
    ],
)
def test_impossible_sizes_are_refused(change: dict, message: str):
    with pytest.raises(ModelError, match=message):
        build_googlenet(**change)
