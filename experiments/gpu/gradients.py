"""The model of parts that compare layouts, and its reference gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.device import Device
from gpipe_hpc.models import build_gpt, build_layer, token_cross_entropy

SEED = 0
MICROBATCHES = 4
VOCAB_SIZE, SEQ_LEN = 64, 16
# Layouts that together cover every kind of transfer and reduction.
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "gpipe, recompute always": {"schedule": "gpipe", "recompute": "always"},
    "one_f_one_b": {"schedule": "one_f_one_b"},
    "one_f_one_b, recompute except_last": {
        "schedule": "one_f_one_b",
        "recompute": "except_last",
    },
    "gpipe, offload": {"schedule": "gpipe", "offload": True},
    "interleaved": {"schedule": "interleaved"},
    "zb_h1": {"schedule": "zb_h1"},
    "zb_v": {"schedule": "zb_v"},
    "hanayo": {"schedule": "hanayo"},
    "dualpipe_v": {"schedule": "dualpipe_v"},
    "chimera": {"schedule": "chimera"},
    "bfloat16": {"schedule": "one_f_one_b", "precision": "bfloat16"},
}
REPLICATED: dict[str, dict[str, Any]] = {
    "two replicas": {"schedule": "one_f_one_b", "replicas": 2},
}
# Float32 sums of a few thousand terms; bfloat16 keeps eight bits.
LIMIT, LIMIT_BFLOAT16 = 1e-4, 5e-2


def model() -> list[LayerSpec]:
    """Return the layers as specs."""
    return build_gpt(vocab_size=VOCAB_SIZE, block_size=SEQ_LEN, num_layers=4, num_heads=4, width=64)


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets on the host."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 2 * MICROBATCHES, SEQ_LEN)
    inputs, targets = torch.randint(0, VOCAB_SIZE, shape, generator=generator)
    return inputs, targets


def plain_gradients(device: Device) -> dict[str, Tensor]:
    """Return the gradients of the mean loss on the host, by global name."""
    inputs, targets = map(device.to_device, batch())
    modules = torch.nn.ModuleList(
        build_layer(layer, index=index, seed=SEED) for index, layer in enumerate(model())
    ).to(device.torch)
    value = inputs
    for module in modules:
        value = module(value)
    total, weight = token_cross_entropy(value, targets)
    torch.autograd.backward(total / weight)
    found = {}
    for name, parameter in modules.named_parameters():
        assert parameter.grad is not None, f"{name}: no gradient"
        found[f"layers.{name}"] = device.to_host(parameter.grad)
    return found


def largest_error(
    world: World, expected: dict[str, Tensor], settings: dict[str, Any], note: Callable[[str], None]
) -> float:
    """Train two steps of a layout; return the largest error of this rank's gradients.

    Relative to the largest element of each. The second step detects state left by the first.
    """
    replicas = settings.get("replicas", 1)
    settings = {
        "stages": world.size // replicas,
        "microbatches": MICROBATCHES // replicas,
        "recompute": "never",
        **settings,
    }
    pipe = Pipeline(model(), token_cross_entropy, seed=SEED, world=world, **settings)
    note("built")
    inputs, targets = batch()
    part = pipe.share(len(inputs))
    for number in range(2):
        result = pipe.step(inputs[part], targets[part])
        note(f"step {number}, loss {result.loss:.6f}")
    own = pipe.named_parameters()
    return max(
        (
            float(
                (world.device.to_host(p.grad) - expected[name]).abs().max()
                / expected[name].abs().max()
            )
            for name, p in own
            if p.grad is not None
        ),
        default=0.0,
    )
