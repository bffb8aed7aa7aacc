"""Weights that transformers would not read back: refused before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.export import export_checkpoint, export_safetensors
from gpipe_hpc.models.huggingface import causal_lm, huggingface_layers

SIZES = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
LLAMA = {"model_type": "llama", "vocab_size": 13, "bos_token_id": 1, "eos_token_id": 2}


def layers_of(change: Callable[[nn.Module], nn.Module]) -> list[LayerSpec]:
    """Return layers of which each is changed once it is built."""
    pytest.importorskip("transformers", reason="transformers is not installed")

    def changed(spec: LayerSpec) -> LayerSpec:
        return LayerSpec(lambda: change(spec.build())).tied(dict(spec.ties))

    return [changed(spec) for spec in huggingface_layers(LLAMA | SIZES | HEADS)]


class Adapted(nn.Module):
    """A linear layer with an adapter, with the names that peft gives."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(requires_grad=False)
        down, up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": each}) for each in (down, up))

    def forward(self, inputs: Tensor) -> Any:
        added = self.lora_B["default"](self.lora_A["default"](inputs))
        return self.base_layer(inputs) + added


class Beside(nn.Linear):
    """The same with the weight under its own name."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.lora_A = nn.Parameter(torch.zeros(2, base.in_features))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + (inputs @ self.lora_A.T).sum(-1, keepdim=True)


class Quantized(nn.Module):
    """A linear layer with weights of 8 bits."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        weight = (base.weight.detach() * 100).to(torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.weight / 100).T


def replaced(by: Callable[[nn.Linear], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Return what replaces one projection of each block."""

    def change(layer: nn.Module) -> nn.Module:
        found = [n for n, m in layer.named_modules() if n.endswith("q_proj")]
        for name in found:
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, by(layer.get_submodule(name)))
        return layer

    return change


def without_norm(layer: nn.Module) -> nn.Module:
    is_norm = type(layer).__name__ == "HuggingFaceNorm"
    if is_norm:
        layer.get_submodule("model").norm = nn.Identity()
    return layer


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Any) -> Any:
        return self.inner(inputs)


def wrapped(layer: nn.Module) -> nn.Module:
    is_block = type(layer).__name__ == "HuggingFaceBlock"
    return Wrapped(layer) if is_block else layer


CHANGES = {
    "adapters": (replaced(Adapted), r"self_attn\.q_proj\.base_layer\.weight.*merge adapters"),
    "beside": (replaced(Beside), r"self_attn\.q_proj\.lora_A.*merge adapters"),
    "int8": (replaced(Quantized), r"self_attn\.q_proj\.weight of int8.*dequantize"),
    "lost": (without_norm, r": no model\.norm\.weight"),
    "wrapped": (wrapped, r"expected 5 layers .*, got 3"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_layers_are_refused_by_name(case: str, tmp_path: Path):
    """transformers started 28 matrices at random, or torch ended in an internal error."""
    change, message = CHANGES[case]
    layers = layers_of(change)
    ids = torch.randint(3, 13, (4, 6), generator=torch.Generator().manual_seed(0))

    def body(world: Any) -> None:
        pipe = Pipeline(
            layers, causal_lm, stages=2, microbatches=2, partition="uniform", world=world
        )
        assert pipe.step(ids, ids).loss > 0
        pipe.save(tmp_path / "checkpoint")
        with pytest.raises(GpipeError, match=message):
            export_safetensors(pipe, tmp_path / "exported")

    run_on_threads(2, body)
    with pytest.raises(GpipeError, match=message):
        export_checkpoint(tmp_path / "checkpoint", layers, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
