"""Reduced precision by autocast: results equal a plain loop under autocast in any layout."""

import pytest
import torch

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import build_gpt, build_layer, token_cross_entropy
from tests.support import cover_of, together, token_batch, train_ranks

SPECS = build_gpt(vocab_size=13, block_size=8, num_layers=2, num_heads=2, width=16)
SEED = 2


# Gradient of the loss: about 1 / micro-batches, times the initial loss scale of float16.
SEEDS = {"bfloat16": 1.0, "float16": 2.0**-3 * 2.0**16}


def plain(order, precision):
    """Return loss and gradients of one step of a plain loop with micro-batches in this order."""
    dtype, seed = getattr(torch, precision), SEEDS[precision]
    layers = [build_layer(spec, index=i, seed=SEED) for i, spec in enumerate(SPECS)]
    inputs, targets = token_batch()
    loss, weight = 0.0, 0
    pieces = list(zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True))
    for m in order:
        x, y = pieces[m]
        with torch.autocast("cpu", dtype):
            for layer in layers:
                x = layer(x)
            total = torch.nn.functional.cross_entropy(
                x.float().flatten(0, 1), y.flatten(), reduction="sum"
            )
        (total * seed).backward()
        loss += total.item()
        weight += y.numel()
    return loss / weight, [p.grad / (weight * seed) for layer in layers for p in layer.parameters()]


def trained(stages, schedule, recompute, precision="bfloat16"):
    options = {"schedule": schedule, "recompute": recompute, "precision": precision}
    whole = together(
        train_ranks(
            SPECS,
            token_cross_entropy,
            [token_batch()],
            ranks=stages,
            microbatches=4,
            seed=SEED,
            **options,
        )
    )
    (gradients,) = whole.gradients
    order = sorted(gradients, key=lambda name: int(name.split(".")[1]))
    return whole.losses[0], [gradients[name] for name in order]


@cover_of(
    "stages, schedule, recompute, precision",
    (3, 1),
    ("gpipe", "one_f_one_b", "zb_h1"),
    ("always", "never"),
    ("bfloat16", "float16"),
)
def test_gradients_are_bitwise_equal_to_plain_loop_under_autocast(
    stages, schedule, recompute, precision
):
    order = range(3, -1, -1) if schedule == "gpipe" else range(4)
    loss, gradients = plain(order, precision)
    our_loss, ours = trained(stages, schedule, recompute, precision)
    assert our_loss == pytest.approx(loss, rel=1e-6)
    for gradient, our in zip(gradients, ours, strict=True):
        assert our.dtype == torch.float32
        assert torch.equal(our, gradient)


def test_bfloat16_gradients_differ_from_float32():
    in_float32 = trained(2, "gpipe", "never", "float32")
    assert not torch.equal(in_float32[1][0], trained(2, "gpipe", "never")[1][0])


def test_unknown_precision_is_refused():
    with pytest.raises(
        ConfigError, match="bad precision, expected one of float32, bfloat16, float16"
    ):
        trained(1, "gpipe", "never", "float8")
