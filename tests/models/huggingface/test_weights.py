"""Tests of loading weights from a folder: each rank reads its own tensors, misfits are named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import build_abstract, build_layer, count_parameters, run_layers
from gpipe_hpc.models.huggingface import huggingface_layers, library, weights

FAMILIES = ("gpt2", "llama", "vit")


@pytest.fixture
def stored(tmp_path: Path, plain_model: Any) -> Any:
    """Return a function that saves the plain model of a family with transformers."""

    def write(family: str, **options: Any) -> tuple[Path, Any]:
        model = plain_model(family)
        model.save_pretrained(tmp_path / family, **options)
        return tmp_path / family, model

    return write


def built(layers: Any) -> dict[int, torch.nn.Module]:
    return {i: build_layer(layer, index=i, seed=0) for i, layer in enumerate(layers)}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "2KB"}], ids=["single", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folder_gives_the_logits_of_the_plain_model(
    family: str, options: Any, stored: Any, batch_of: Any
):
    folder, plain = stored(family, **options)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(options)
    layers = huggingface_layers(folder, dtype="float64")
    assert count_parameters(layers) == sum(p.numel() for p in plain.parameters())
    inputs, _ = batch_of(family)
    assert torch.equal(run_layers(built(layers), layers, inputs), plain(inputs).logits)


def test_a_layer_reads_its_own_tensors_alone(stored: Any, monkeypatch: pytest.MonkeyPatch):
    folder, plain = stored("llama", max_shard_size="2KB")
    layers = huggingface_layers(folder)
    read: list[str] = []
    original = weights.WeightFolder.read

    def counting(self: Any, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(weights.WeightFolder, "read", counting)
    for index, expected in ((0, ["model.embed_tokens.weight"]), (5, ["lm_head.weight"])):
        build_layer(layers[index], index=index, seed=0)
        assert read == expected
        read.clear()
    build_layer(layers[2], index=2, seed=0)
    assert sorted(read) == sorted(n for n in plain.state_dict() if "layers.1." in n)
    read.clear()
    for index, layer in enumerate(layers):
        build_abstract(layer, index=index)
    assert read == []


def test_rank_reads_no_more_bytes_than_it_keeps(
    stored: Any, batch_of: Any, monkeypatch: pytest.MonkeyPatch
):
    folder, plain = stored("llama")
    layers = huggingface_layers(folder)
    safetensors = library.safetensors()
    counted: list[int] = []

    class Counting:
        """A safetensors file that records the bytes of each tensor read."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safetensors.safe_open(*args, **kwargs)

        def __enter__(self) -> "Counting":
            self.file.__enter__()
            return self

        def __exit__(self, *exc: Any) -> None:
            self.file.__exit__(*exc)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self.file.get_tensor(name)
            counted.append(tensor.nbytes)
            return tensor

    monkeypatch.setattr(
        weights,
        "safetensors",
        lambda: type(
            "Library", (), {"safe_open": Counting, "SafetensorError": safetensors.SafetensorError}
        ),
    )
    first_stage = [build_layer(layers[i], index=i, seed=0) for i in range(3)]
    kept = sum(p.numel() * 8 for layer in first_stage for p in layer.parameters())
    assert sum(counted) == kept < sum(p.nbytes for p in plain.parameters())


def test_weights_without_prefix_and_of_old_names_are_taken(stored: Any, batch_of: Any):
    folder, plain = stored("gpt2")
    old = {n.removeprefix("transformer."): t for n, t in tensors_of(folder).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # a mask that GPT-2 once stored
    write_tensors(folder, old)
    layers = huggingface_layers(folder, dtype="float64")
    inputs, _ = batch_of("gpt2")
    assert torch.equal(run_layers(built(layers), layers, inputs), plain(inputs).logits)


def test_fresh_tensors_start_anew(stored: Any):
    folder, plain = stored("vit")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {str(i): str(i) for i in range(7)}, "label2id": {}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"classifier\.\w+ of shape \[7"):
        huggingface_layers(folder)
    layers = huggingface_layers(folder, dtype="float64", fresh=["classifier.*"])
    modules = built(layers)
    assert modules[5].state_dict()["classifier.weight"].shape == (7, 8)
    start = modules[0].state_dict()["vit.embeddings.cls_token"]
    assert torch.equal(start, plain.vit.embeddings.cls_token)
    with pytest.raises(ConfigError, match=r"'clasifier\.\*' of fresh"):
        huggingface_layers(folder, fresh=["classifier.*", "clasifier.*"])


def test_missing_and_extra_tensors_are_named(stored: Any):
    folder, _ = stored("llama")
    tensors = tensors_of(folder)
    tensors["model.layers.1.mlp.bonus.weight"] = tensors.pop("model.norm.weight")
    write_tensors(folder, tensors)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.bonus"):
        huggingface_layers(folder)
    del tensors["model.layers.1.mlp.bonus.weight"]
    write_tensors(folder, tensors)
    with pytest.raises(ModelError, match=r"got model\.norm\.weight;"):
        huggingface_layers(folder)


def test_tied_tensors_that_differ_are_refused(stored: Any):
    folder, _ = stored("gpt2")
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    write_tensors(folder, tensors)
    layers = huggingface_layers(folder)
    with pytest.raises(ModelError, match=r"lm_head\.weight .*differ"):
        build_layer(layers[-1], index=5, seed=0)


def test_pickled_missing_and_damaged_files_are_refused(stored: Any, tmp_path: Path):
    folder, _ = stored("llama", max_shard_size="2KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    with pytest.raises(ModelError, match=rf"cannot read .*{shard.name}"):
        huggingface_layers(folder)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"lacks the file {shard.name}"):
        huggingface_layers(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"lacks the file model\.safetensors"):
        huggingface_layers(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match=r"pickled weights.*pytorch_model\.bin"):
        huggingface_layers(folder)


def test_index_does_not_lead_out_of_the_folder(stored: Any, tmp_path: Path):
    folder, _ = stored("llama", max_shard_size="2KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    (tmp_path / "elsewhere.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"lacks the file elsewhere\.safetensors"):
        huggingface_layers(folder)


def test_names_of_the_hub_are_not_downloaded(library: Any):
    with pytest.raises(ModelError, match=r"'openai-community/gpt2'.*hf download"):
        huggingface_layers("openai-community/gpt2")


def test_config_file_alone_starts_anew(stored: Any):
    folder, plain = stored("gpt2")
    layers = huggingface_layers(folder / "config.json")
    start = build_layer(layers[1], index=1, seed=0).state_dict()
    assert not torch.equal(
        start["transformer.h.0.attn.c_attn.weight"],
        plain.transformer.h[0].attn.c_attn.weight.float(),
    )


def test_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(library, "import_module", absent)
    with pytest.raises(ConfigError, match=r"pip install 'gpipe-hpc\[huggingface\]'"):
        huggingface_layers("/anywhere")


@pytest.mark.parametrize("version", ["4.57.6", "5.4.0", "6.0.0"])
def test_unknown_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch):
    found = SimpleNamespace(__version__=version)
    monkeypatch.setattr(library, "import_module", lambda name: found)
    with pytest.raises(ConfigError, match=rf"expected 5\.5.*got {version};"):
        huggingface_layers("/anywhere")
