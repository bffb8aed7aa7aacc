"""Planned activation and boundary sizes of transformers models equal the real sizes."""

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.precision import casting, keeping_casts
from gpipe_hpc.models.huggingface import huggingface_layers
from gpipe_hpc.models.huggingface.library import transformers_part
from gpipe_hpc.models.huggingface.meta_tensors import run_without_values
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.pytree import map_tensors, tensors_of
from tests.support import covering

CPU = HostDevice()


WAYS = ("sdpa", "eager"), ("bfloat16", "float32")


def run_keeping(layers: list[nn.Module], given, precision: str, runs: int):
    """Run layers as a stage does; return the bytes kept by autograd and by each layer's output."""
    own = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
    weights = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in weights:
            kept[key] = tensor
        return tensor

    crossing: list[list[int]] = []
    ends = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(runs):
            value = map_tensors(torch.clone, given)
            crossing = []
            for layer in layers:
                with casting(precision, CPU):
                    value = layer(value)
                crossing.append([tensor.nbytes for tensor in tensors_of(value)])
            ends.append(value)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), crossing


@pytest.mark.parametrize(
    "family, attention, precision, with_mask",
    [
        *covering(("gpt2", "llama", "gemma3_text"), *WAYS, (False, True)),
        *((*each, False) for each in covering(("vit",), *WAYS)),
    ],
)
def test_what_is_counted_is_what_is_kept(
    configs, batch_of, family, attention, precision, with_mask
):
    """Regression: in 16 bits, plans counted a causal mask that an eager run omits.

    Grouped heads and windows were counted with attention scores, which fused attention does not
    store.
    """
    layers = huggingface_layers(configs[family], attention=attention)
    given = map_tensors(lambda t: t.float() if t.is_floating_point() else t, batch_of(family)[0])
    if with_mask:  # without padding
        given = {"input_ids": given, "attention_mask": torch.ones_like(given)}
    real = [layer.build() for layer in layers]
    with keeping_casts(precision, CPU) if precision != "float32" else nullcontext():
        once, crossing = run_keeping(real, given, precision, 1)
        kept = run_keeping(real, given, precision, 2)[0] - once
    example = map_tensors(lambda tensor: torch.empty_like(tensor, device="meta"), given)
    model = count_model(layers, example, precision=precision)
    assert count_stages(model, [len(layers)])[0].activation_bytes == kept
    assert [list(layer.output.tensors) for layer in model.layers] == crossing


def test_the_boundary_of_a_long_llama_carries_no_mask(library):
    """Regression: with 32,768 tokens, an unneeded mask tripled the boundary to 1.54 GiB."""
    config = library.LlamaConfig(
        vocab_size=8,
        hidden_size=4096,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    layers = huggingface_layers(config)
    tokens = torch.empty(1, 32768, dtype=torch.int64, device="meta")
    model = count_model(layers, tokens, precision="bfloat16", device_type="cuda")
    hidden, angles, positions = 32768 * 4096 * 4, 2 * 32768 * 128 * 4, 32768 * 8
    assert model.layers[0].output_bytes == hidden + angles + positions
    # The block keeps no matrix of attention scores for each head.
    assert model.layers[1].activation_bytes < 32 * 32768 * 32768


def test_the_library_takes_fakes_for_tracing_again_after_a_trial(library):
    """Regression: plans in parallel threads restored each other's patched function."""
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fake = torch.empty(2)
    utilities = transformers_part("utils.import_utils")
    before = utilities.is_fake_tensor

    seen: list[bool] = []

    def look() -> None:
        for _ in range(25):
            with run_without_values(fake):
                time.sleep(0.001)  # let another thread run
                seen.append(utilities.is_tracing(fake))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] * 100
    assert utilities.is_fake_tensor is before and utilities.is_tracing(fake)
