"""A checkpoint exported by one process is what its ranks would have exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import CheckpointError, ConfigError
from gpipe_hpc.export import export_checkpoint, export_safetensors
from gpipe_hpc.models import build_model, token_cross_entropy
from gpipe_hpc.models.huggingface import huggingface_layers

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 13,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES = {"vocab_size": 13, "block_size": 8, "num_layers": 1, "num_heads": 2, "width": 8}


@pytest.fixture(autouse=True)
def libraries() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes", [10**9, 1000], ids=["one_file", "many_files"])
@pytest.mark.parametrize("is_theirs", [True, False], ids=["transformers", "zoo"])
def test_checkpoint_gives_what_its_ranks_give(is_theirs: bool, shard_bytes: int, tmp_path: Path):
    layers = huggingface_layers(GPT2) if is_theirs else build_model("gpt2", **SIZES)
    tokens = torch.arange(12).reshape(2, 6)

    def body(world: Any) -> None:
        pipe = Pipeline(layers, token_cross_entropy, world=world)
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(tokens, tokens)
        optimizer.step()
        pipe.save(tmp_path / "checkpoint", optimizer)
        export_safetensors(pipe, tmp_path / "ranks")

    run_on_threads(2, body)
    folder = export_checkpoint(tmp_path / "checkpoint", layers, tmp_path / "one", shard_bytes)
    expected, found = stored(tmp_path / "ranks"), stored(folder)
    num_files = len(list(folder.glob("*.safetensors")))
    assert num_files == 1 if shard_bytes > 1000 else 3 <= num_files <= len(layers)
    assert (folder / "model.safetensors.index.json").exists() == (shard_bytes == 1000)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    others = {path.name for path in folder.glob("*config.json")}
    assert others == {path.name for path in (tmp_path / "ranks").glob("*config.json")}


def test_another_model_is_refused_by_name(tmp_path: Path):
    pipe = Pipeline([LayerSpec(nn.Linear, 4, 4)], token_cross_entropy)
    pipe.save(tmp_path / "checkpoint")
    other = [LayerSpec(nn.Linear, 4, 5)]
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight of shape \[5, 4\], got \[4, 4\]"):
        export_checkpoint(tmp_path / "checkpoint", other, tmp_path / "exported")
    more = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)]
    with pytest.raises(CheckpointError, match=r"layers\.1\.weight of shape \[4, 4\], got none"):
        export_checkpoint(tmp_path / "checkpoint", more, tmp_path / "exported")
    with pytest.raises(CheckpointError, match="nowhere"):
        export_checkpoint(tmp_path / "nowhere", other, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_cut_short_is_named_and_nothing_is_made(tmp_path: Path):
    layers = [LayerSpec(nn.Linear, 4, 4)]
    Pipeline(layers, token_cross_entropy).save(tmp_path / "checkpoint")
    listed = tmp_path / "checkpoint" / ".metadata"
    listed.write_bytes(listed.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"the file \.metadata is damaged"):
        export_checkpoint(tmp_path / "checkpoint", layers, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_without_a_prefix_a_plain_sequential_loads_it(tmp_path: Path):
    """Its names began with `layers.`, so a user had to rename each before load_state_dict."""
    layers = [LayerSpec(nn.Linear, 4, 6), nn.Tanh(), LayerSpec(nn.Linear, 6, 2)]
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])

    def body(world: Any) -> torch.Tensor:
        pipe = Pipeline(layers, nn.functional.cross_entropy, world=world)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        pipe.step(inputs, targets)
        optimizer.step()
        pipe.save(tmp_path / "checkpoint", optimizer)
        export_safetensors(pipe, tmp_path / "ranks", prefix="")
        return pipe.predict(inputs)

    expected = run_on_threads(2, body)[0]
    export_checkpoint(tmp_path / "checkpoint", layers, tmp_path / "one", prefix="")
    for folder in (tmp_path / "ranks", tmp_path / "one"):
        plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        plain.load_state_dict(stored(folder))
        assert torch.equal(plain(inputs), expected)


def test_a_model_of_transformers_keeps_its_names(tmp_path: Path):
    layers = huggingface_layers(GPT2)
    pipe = Pipeline(layers, token_cross_entropy)
    with pytest.raises(
        ConfigError, match=r"export\.prefix, expected 'layers\.' for a transformers model"
    ):
        export_safetensors(pipe, tmp_path / "exported", prefix="")
    assert not (tmp_path / "exported").exists()
