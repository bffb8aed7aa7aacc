"""Gradients of pipelined transformers models equal those of the plain models."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.models import classification
from gpipe_hpc.models.huggingface import causal_lm, huggingface_layers

TOLERANCE = 1e-10
FAMILIES = ("gpt2", "llama", "gemma3_text", "vit")


class Layout(NamedTuple):
    stages: int
    schedule: str
    recompute: str
    attention: str
    masked: bool = False


LAYOUTS = (
    Layout(2, "gpipe", "always", "eager"),
    Layout(4, "zb_h1", "never", "sdpa", masked=True),
    Layout(2, "zb_h1", "except_last", "eager", masked=True),
)


def loss_of(family: str) -> Callable[..., Any]:
    return classification if family == "vit" else causal_lm


def original(name: str) -> str:
    """Return the parameter's name in the model, given its global name."""
    return name.split(".", 2)[2]


def pipelined(family: str, layers: Any, layout: Layout, inputs: Any, targets: Any) -> Any:
    """Return loss, initial weights and gradients of one step of a pipeline."""

    def body(world: Any) -> Any:
        pipe = Pipeline(
            layers,
            loss_of(family),
            stages=layout.stages,
            microbatches=3,
            schedule=layout.schedule,
            recompute=layout.recompute,
            partition="uniform",
            world=world,
        )
        named = dict(pipe.named_parameters())
        start = {original(n): p.detach().clone() for n, p in named.items()}
        loss = pipe.step(inputs, targets).loss
        return loss, start, {original(n): p.grad for n, p in named.items()}

    ranks = run_on_threads(layout.stages, body)
    start = {n: p for _, part, _ in ranks for n, p in part.items()}
    return ranks[0][0], start, {n: g for _, _, part in ranks for n, g in part.items()}


def backward_plain(family: str, plain: Any, inputs: Any, targets: Any) -> tuple[float, int]:
    """Run the plain model forward and backward; return the sum of losses and its weight.

    The batch is not split, except for Gemma, whose norms sum their weights' gradients in float32.
    Gradients are not scaled here but afterwards, as in a pipeline: scaling before the backward
    rounds differently in the float32 norms and softmax of these models.
    """
    named = inputs if isinstance(inputs, dict) else {plain.main_input_name: inputs}
    loss, weight = 0.0, 0
    for own in torch.arange(len(targets)).tensor_split(3 if family == "gemma3_text" else 1):
        logits = plain(**{name: tensor[own] for name, tensor in named.items()}).logits
        total, count, *_ = loss_of(family)(logits, targets[own])
        total.backward()
        loss, weight = loss + total.item(), weight + int(count)
    return loss, weight


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: f"{each.stages}_{each.schedule}")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_plain_model(
    family: str, layout: Layout, configs: Any, plain_model: Any, batch_of: Any
):
    inputs, targets = batch_of(family, layout.masked)
    layers = huggingface_layers(configs[family], attention=layout.attention, dtype="float64")
    loss, start, gradients = pipelined(family, layers, layout, inputs, targets)
    plain = plain_model(family, layout.attention)
    missing = plain.load_state_dict(start, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}  # tied to the embedding
    total, weight = backward_plain(family, plain, inputs, targets)
    assert loss == pytest.approx(total / weight, rel=TOLERANCE)
    named = dict(plain.named_parameters())
    assert gradients.keys() == named.keys()
    for name, parameter in named.items():
        torch.testing.assert_close(
            gradients[name], parameter.grad / weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name
        )


def test_weights_and_dropout_do_not_depend_on_the_cut(configs: Any, batch_of: Any):
    inputs, targets = batch_of("gpt2")
    config = configs["gpt2"] | {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    layers = huggingface_layers(config, attention="eager")
    runs = [
        pipelined("gpt2", layers, Layout(k, "gpipe", recompute, "eager"), inputs, targets)
        for k, recompute in ((1, "never"), (3, "always"))
    ]
    assert runs[0][0] == runs[1][0]
    for name, gradient in runs[0][2].items():
        tied = name == "transformer.wte.weight"  # summed over stages, in another order
        tolerance = 1e-6 if tied else 0.0
        torch.testing.assert_close(gradient, runs[1][2][name], rtol=0.0, atol=tolerance, msg=name)
