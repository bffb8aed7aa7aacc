"""Exported weights: a folder that others read, written by all ranks, whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import CheckpointError, ConfigError
from gpipe_hpc.export import export_safetensors
from gpipe_hpc.models import build_model, classification, token_cross_entropy
from gpipe_hpc.models.huggingface import huggingface_layers, library

VOCABULARY, LENGTH = 13, 6
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 3,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


@pytest.fixture
def transformers() -> Any:
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    found.logging.set_verbosity_error()
    return found


def trained(
    layers: Callable[[], Any], folder: Path, world_size: int = 2, **options: Any
) -> list[Any]:
    """Train two steps, export, and return what each rank predicts for its inputs."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    inputs, targets, loss = tokens, tokens, token_cross_entropy
    if options.pop("images", False):
        inputs = torch.randn(4, 3, 8, 8, generator=generator)
        targets, loss = torch.arange(4) % 2, classification
    shard_bytes = options.pop("shard_bytes", 10**9)

    def body(world: Any) -> Any:
        pipe = Pipeline(layers(), loss, microbatches=2, world=world, **options)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1) if pipe.parameters() else None
        for _ in range(2):
            part = pipe.share(4)
            pipe.step(inputs[part], targets[part])
            if optimizer is not None:
                optimizer.step()
        assert export_safetensors(pipe, folder, shard_bytes) == folder
        return pipe.predict(inputs), {n: p.detach() for n, p in pipe.named_parameters()}

    return [inputs, *run_on_threads(world_size, body)]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GPT2, {"schedule": "zb_h1", "recompute": "never"}),
        (LLAMA, {"schedule": "chimera", "shard_bytes": 1500}),
        (VIT, {"replicas": 2, "world_size": 4, "images": True}),
    ],
    ids=["gpt2", "llama_mirrored", "vit_replicas"],
)
def test_from_pretrained_gives_the_same_logits(
    config: Any, options: Any, transformers: Any, tmp_path: Path
):
    folder = tmp_path / "exported"
    layers = huggingface_layers(config)
    inputs, (ours, _), *_ = trained(lambda: layers, folder, **options)
    auto = transformers.AutoModelForCausalLM
    if config is VIT:
        auto = transformers.AutoModelForImageClassification
    model, info = auto.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    # Micro-batches of the size in which the pipeline predicts, or sums differ in the last digit.
    with torch.no_grad():
        plain = torch.cat([model(part).logits for part in inputs.tensor_split(2)])
    assert torch.equal(plain[: len(ours)], ours)
    again = huggingface_layers(folder)
    assert [layer.ties for layer in again] == [layer.ties for layer in layers]
    # The names are those that transformers itself stores.
    model.save_pretrained(tmp_path / "theirs")
    theirs = tmp_path / "theirs" / "model.safetensors"
    with library.safetensors().safe_open(theirs, framework="pt") as file:
        assert set(file.keys()) == stored(folder).keys()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    load = library.safetensors_torch().load_file
    return {n: t for file in folder.glob("*.safetensors") for n, t in load(file).items()}


def test_index_names_the_file_of_each_tensor(transformers: Any, tmp_path: Path):
    folder = tmp_path / "exported"
    layers = huggingface_layers(GPT2)
    trained(lambda: layers, folder, world_size=3, partition=[2, 2, 2])
    files = sorted(path.name for path in folder.iterdir())
    shards = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    assert files == [
        "config.json",
        "generation_config.json",
        *shards,
        "model.safetensors.index.json",
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = stored(folder)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["weight_map"]["transformer.wte.weight"] == shards[0]
    assert index["weight_map"]["transformer.h.2.ln_1.weight"] == shards[1]
    assert index["weight_map"]["transformer.ln_f.weight"] == shards[2]
    assert "lm_head.weight" not in tensors  # tied to the embedding: once


@pytest.mark.parametrize("stages", [1, 3])
def test_other_models_go_by_global_names(stages: int, tmp_path: Path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    sizes = {"vocab_size": VOCABULARY, "block_size": 8, "num_layers": 1, "num_heads": 2}
    layers = build_model("gpt2", **sizes, width=8)
    folder = tmp_path / "exported"
    _, *ranks = trained(lambda: layers, folder, world_size=stages)
    parameters = {n: p for _, part in ranks for n, p in part.items()}
    tensors = stored(folder)
    tied = tensors.pop("layers.4.weight")  # under both of its names
    assert torch.equal(tied, tensors["layers.0.token.weight"])
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], p) for name, p in parameters.items())
    assert not (folder / "config.json").exists()


def test_kept_buffers_are_exported(tmp_path: Path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    norm = nn.BatchNorm1d(4)
    pipe = Pipeline([LayerSpec(nn.Linear, 4, 4), norm], token_cross_entropy)
    export_safetensors(pipe, tmp_path / "exported")
    assert torch.equal(stored(tmp_path / "exported")["layers.1.running_var"], torch.ones(4))


def test_existing_folder_stays_as_it_is(tmp_path: Path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    folder = tmp_path / "exported"
    folder.mkdir()
    pipe = Pipeline([LayerSpec(nn.Linear, 4, 4)], token_cross_entropy)
    with pytest.raises(CheckpointError, match=r"exported exists already"):
        export_safetensors(pipe, folder)
    assert list(tmp_path.iterdir()) == [folder] and not list(folder.iterdir())


def test_nothing_appears_when_a_rank_cannot_write(tmp_path: Path, monkeypatch: Any):
    safetensors_torch = pytest.importorskip("safetensors.torch", reason="not installed")
    original = safetensors_torch.save_file

    def full(tensors: Any, file: Path, **options: Any) -> None:
        if "layers.1.weight" in tensors:
            raise OSError(28, "No space left on device")
        original(tensors, file, **options)

    monkeypatch.setattr(safetensors_torch, "save_file", full)
    folder = tmp_path / "exported"
    specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]

    def body(world: Any) -> str:
        pipe = Pipeline(specs, token_cross_entropy, world=world)
        with pytest.raises(Exception, match=r"exported\.partial.*cannot be written.*No space"):
            export_safetensors(pipe, folder)
        return "told"

    assert run_on_threads(2, body) == ["told", "told"]
    assert not folder.exists()


def test_missing_library_names_the_command(tmp_path: Path, monkeypatch: Any):
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(library, "import_module", absent)
    pipe = Pipeline([LayerSpec(nn.Linear, 4, 4)], token_cross_entropy)
    with pytest.raises(ConfigError, match=r"safetensors.*pip install 'gpipe-hpc\[huggingface\]'"):
        export_safetensors(pipe, tmp_path / "exported")


def test_no_pickle_is_written(transformers: Any, tmp_path: Path):
    folder = tmp_path / "exported"
    layers = huggingface_layers(LLAMA)
    trained(lambda: layers, folder)
    kinds = {path.suffix for path in folder.iterdir()}
    assert kinds == {".json", ".safetensors"}
    assert SimpleNamespace(**json.loads((folder / "config.json").read_text())).dtype == "float32"
