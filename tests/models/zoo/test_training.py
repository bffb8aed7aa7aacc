"""Small models of the zoo train the same in two stages as in one, dropout included."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.models import (
    bert_pretraining,
    build_layer,
    build_model,
    classification,
    classification_with_auxiliary,
    microbatch_key,
    run_layer,
    segmentation,
    skip_names,
    token_cross_entropy,
)

SEED, NUM_SAMPLES, NUM_STEPS, NUM_MICROBATCHES = 3, 5, 2, 3
LR = 0.05


class Case(NamedTuple):
    name: str
    sizes: dict[str, Any]
    loss_fn: Callable[..., Any]
    side: int = 0  # pixels of an image; 0: tokens


IMAGE_SIZES = {"num_classes": 4, "in_channels": 2, "width": 2, "hidden": 16}
SMALL = {"num_classes": 4, "in_channels": 2}
TOKEN_SIZES = {"vocab_size": 11, "block_size": 8, "num_layers": 2, "num_heads": 2, "width": 8}
CASES = {
    "vgg16": Case("vgg16", IMAGE_SIZES, classification, 32),
    "vgg19": Case("vgg19", IMAGE_SIZES, classification, 33),
    "alexnet": Case("alexnet", IMAGE_SIZES, classification, 63),
    "amoebanet_d": Case(
        "amoebanet_d", {**SMALL, "num_layers": 3, "num_filters": 8}, classification, 64
    ),
    "googlenet": Case(
        "googlenet", {**SMALL, "width": 8, "auxiliary": True}, classification_with_auxiliary, 64
    ),
    "resnet50": Case("resnet50", {**SMALL, "num_blocks": [1, 1], "width": 4}, classification, 20),
    "resnet110_v2": Case("resnet110_v2", {**SMALL, "depth": 11, "width": 4}, classification, 9),
    "resnet_small": Case("resnet_small", {**SMALL, "width": 4}, classification, 8),
    "unet": Case(
        "unet", {**SMALL, "num_convs": 1, "base_channels": 4, "depth": 2}, segmentation, 9
    ),
    "transformer_l": Case(
        "transformer_l", {**TOKEN_SIZES, "hidden": 12, "dropout": 0.1}, token_cross_entropy
    ),
    "bert48": Case("bert48", TOKEN_SIZES, token_cross_entropy),
    "bert48_pair": Case("bert48", {**TOKEN_SIZES, "next_sentence": True}, bert_pretraining),
    "gpt2_64": Case("gpt2_64", {**TOKEN_SIZES, "dropout": 0.1}, token_cross_entropy),
}


SHORT = {"num_convs": (1, 2)}  # fewer groups for the test that cuts after every layer
CUT_CASES = {
    "vgg": Case("vgg16", IMAGE_SIZES | SHORT, classification, 8),
    **{name: case for name, case in CASES.items() if not name.startswith("vgg")},
    "resnet_small": Case(
        "resnet_small", {**SMALL, "num_blocks": [1, 1], "width": 4}, classification, 8
    ),
}


def as_double(spec: LayerSpec) -> LayerSpec:
    double = LayerSpec(lambda: spec.build().double())
    return double.stashing(*spec.stashes).popping(*spec.pops)


def specs_of(case: Case) -> list[LayerSpec]:
    return [as_double(spec) for spec in build_model(case.name, **case.sizes)]


def batch(case: Case) -> tuple[torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    if case.side:
        shape = (NUM_SAMPLES, 2, case.side, case.side)
        images = torch.randn(shape, dtype=torch.float64, generator=generator)
        if case.loss_fn is segmentation:
            return images, torch.randint(4, (shape[0], *shape[2:]), generator=generator)
        return images, torch.arange(NUM_SAMPLES) % 4
    tokens = torch.randint(11, (NUM_SAMPLES, 9), generator=generator)
    if case.loss_fn is bert_pretraining:
        return tokens[:, :-1], (tokens[:, 1:], torch.arange(NUM_SAMPLES) % 2)
    return tokens[:, :-1], tokens[:, 1:]


def pieces(nest: Any) -> list[Any]:
    if isinstance(nest, tuple):
        return list(zip(*map(pieces, nest), strict=True))
    return list(nest.tensor_split(NUM_MICROBATCHES))


Step = tuple[float, dict[str, torch.Tensor | None]]


def plain(case: Case, num_steps: int = NUM_STEPS) -> list[Step]:
    """Train in one process, setting the published seeds; return losses and gradients."""
    specs = specs_of(case)
    layers = [build_layer(spec, index=i, seed=SEED) for i, spec in enumerate(specs)]
    named = {f"layers.{i}.{n}": p for i, x in enumerate(layers) for n, p in x.named_parameters()}
    inputs, targets = batch(case)
    history = []
    for step in range(num_steps):
        nn.ModuleList(layers).zero_grad()
        loss, weight = 0.0, 0
        for m, (x, y) in enumerate(zip(pieces(inputs), pieces(targets), strict=True)):
            stashed: dict[str, Any] = {}
            for index, layer in enumerate(layers):
                torch.manual_seed(microbatch_key(SEED, step, m, index))
                x = run_layer(layer, skip_names(specs[index]), x, stashed, "plain")
            total, count = case.loss_fn(x, y)[:2]
            total.backward()
            loss, weight = loss + total.item(), weight + int(count)
        gradients = {n: None if p.grad is None else p.grad / weight for n, p in named.items()}
        history.append((loss / weight, gradients))
        with torch.no_grad():
            for name, gradient in gradients.items():
                if gradient is not None:
                    named[name] -= LR * gradient
    return history


def pipelined(
    case: Case, partition: str | list[int], num_steps: int = NUM_STEPS, **options: Any
) -> list[Step]:
    inputs, targets = batch(case)

    def body(world: Any) -> list[Step]:
        pipe = Pipeline(
            specs_of(case),
            case.loss_fn,
            stages=2,
            microbatches=NUM_MICROBATCHES,
            partition=partition,
            seed=SEED,
            world=world,
            **options,
        )
        history = []
        for _ in range(num_steps):
            loss = pipe.step(inputs, targets).loss
            gradients = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in pipe.named_parameters()
            }
            history.append((loss, gradients))
            with torch.no_grad():
                for parameter in pipe.parameters():
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
        return history

    first, second = run_on_threads(2, body)
    assert [loss for loss, _ in first] == [loss for loss, _ in second]
    return [(a[0], a[1] | b[1]) for a, b in zip(first, second, strict=True)]


def assert_same(history: list[Step], expected: list[Step]) -> None:
    for (loss, gradients), (other, others) in zip(history, expected, strict=True):
        assert loss == pytest.approx(other, rel=1e-10)
        assert gradients.keys() == others.keys()
        largest = max(each.abs().max() for each in others.values() if each is not None)
        for name, gradient in gradients.items():
            if others[name] is None:
                assert gradient is None, name
            else:
                # Relative to the gradient's own size, as gradients of early layers are small. The
                # gradient of a bias before a norm consists only of rounding errors.
                size = max(others[name].abs().max(), 1e-4 * largest)
                assert (gradient - others[name]).abs().max() <= 1e-10 * size, name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trains_as_in_one_piece(case: Case):
    expected = plain(case)
    used = [gradient for gradient in expected[1][1].values() if gradient is not None]
    assert expected[0][0] != expected[1][0] and all(each.any() for each in used)
    assert_same(pipelined(case, "parameters"), expected)
    assert_same(pipelined(case, "uniform", schedule="zb_h1", recompute="never"), expected)


QUICK = ("vgg", "transformer_l", "resnet_small")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, case in CUT_CASES.items()
    ],
)
def test_may_be_cut_between_any_two_layers(case: Case):
    """Every partition into two stages, with recomputation, gives the same results.

    One step is enough: the test above covers several steps for each model.
    """
    expected = plain(case, 1)
    num_layers = len(specs_of(case))
    for cut in range(1, num_layers):
        history = pipelined(case, [cut, num_layers - cut], 1, recompute="always")
        assert_same(history, expected)
