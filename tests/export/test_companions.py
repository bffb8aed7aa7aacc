"""What goes with exported weights: everything of the model's folder that is not weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.export import export_checkpoint, export_safetensors
from gpipe_hpc.models import build_model, mean_squared_error
from gpipe_hpc.models.huggingface import causal_lm, huggingface_layers

VOCABULARY = 13


@pytest.fixture
def transformers() -> Any:
    found = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    found.logging.set_verbosity_error()
    return found


@pytest.fixture
def source(transformers: Any, tmp_path: Path) -> Path:
    """Return a folder as the hub has them: weights, tokenizer, settings of generation, and more."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "source"
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2
    )
    config.bos_token_id = config.eos_token_id = 1
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", chat_template="{{ messages }}"
    ).save_pretrained(folder)
    generation = {"eos_token_id": [1, 7], "temperature": 0.6, "do_sample": True, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    entries = json.loads((folder / "config.json").read_text()) | {"of_mine": {"torch_dtype": "x"}}
    del entries["dtype"]
    (folder / "config.json").write_text(json.dumps(entries | {"torch_dtype": "float32"}))
    (folder / "LICENSE").write_text("Do as you like.")
    (folder / "spiece.model").write_bytes(bytes(range(256)))
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    (folder / "training_args.bin").write_bytes(b"pickled")
    (folder / ".gitattributes").write_text("*.bin lfs")
    (folder / "runs").mkdir()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


def exported(path: Path | dict[str, Any], folder: Path, **options: Any) -> Path:
    layers = huggingface_layers(path)

    def body(world: Any) -> None:
        export_safetensors(Pipeline(layers, causal_lm, world=world), folder, **options)

    run_on_threads(2, body)
    return folder


def test_all_but_weights_is_copied_as_it_is(transformers: Any, source: Path, tmp_path: Path):
    """An end token and the temperature were lost, and the tokenizer stayed behind."""
    folder = exported(source, tmp_path / "exported")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    kept = {"generation_config.json", "LICENSE", "spiece.model", "tokenizer.json"}
    kept |= {"tokenizer_config.json", "additional_chat_templates/tools.jinja"}
    assert kept < found
    assert found - kept <= {
        "config.json",
        "model.safetensors.index.json",
        "chat_template.jinja",
    } | {path.name for path in folder.glob("*.safetensors")}
    for name in found - {path.name for path in folder.glob("*.safetensors*")} - {"config.json"}:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [1, 7] and generation.temperature == 0.6
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(f) for f in (folder, source))
    assert ours("w3 w5 w12")["input_ids"] == theirs("w3 w5 w12")["input_ids"]
    assert ours.chat_template == theirs.chat_template
    entries, before = (json.loads((f / "config.json").read_text()) for f in (folder, source))
    assert entries.pop("dtype") == before.pop("torch_dtype")
    assert entries == before  # also what transformers does not know


def test_new_weights_by_a_config_take_along_what_belongs_to_a_model(source: Path, tmp_path: Path):
    (source / "notes.txt").write_text("mine")
    (source.parent / "secret").write_text("of the user")
    (source / "vocab.txt").symlink_to(source.parent / "secret")
    (source / "vocab_2.txt").symlink_to(source / "LICENSE")
    folder = exported(source / "config.json", tmp_path / "exported")
    found = {path.name for path in folder.iterdir()}
    assert {"generation_config.json", "tokenizer.json", "spiece.model", "LICENSE"} < found
    assert "vocab_2.txt" in found and "vocab.txt" not in found
    assert not {"notes.txt", "pytorch_model.bin", ".gitattributes", "runs"} & found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", None])
@pytest.mark.parametrize("way", ["ranks", "checkpoint"])
def test_weights_are_cast_and_named(
    transformers: Any, source: Path, tmp_path: Path, dtype: str | None, way: str
):
    folder = tmp_path / "exported"
    if way == "ranks":
        exported(source, folder, dtype=dtype)
    else:
        layers = huggingface_layers(source)
        Pipeline(layers, causal_lm).save(tmp_path / "checkpoint")
        export_checkpoint(tmp_path / "checkpoint", layers, folder, dtype=dtype)
    expected = getattr(torch, dtype or "float32")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == str(expected).removeprefix("torch.") and "torch_dtype" not in config
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours, plain = load(folder), load(source, dtype=expected)
    assert ours.dtype == expected
    state = plain.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in ours.state_dict().items())


def test_an_unknown_dtype_is_refused_before_anything_is_written(tmp_path: Path):
    pipe = Pipeline([LayerSpec(nn.Linear, 4, 4)], mean_squared_error)
    with pytest.raises(ConfigError, match=r"unknown dtype.*bfloat16.*got 'int8'"):
        export_safetensors(pipe, tmp_path / "exported", dtype="int8")
    assert not list(tmp_path.iterdir())


class Twice(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["tied over layers", "within a layer"])
def test_load_state_dict_finds_every_name(stages: int, kind: str, tmp_path: Path):
    """The second name of a tied weight was missing."""
    safetensors = pytest.importorskip("safetensors.torch")
    if kind == "within a layer":
        layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(Twice)]
    else:
        layers = build_model("gpt2", vocab_size=5, block_size=8, num_layers=1, num_heads=2, width=8)

    def body(world: Any) -> None:
        pipe = Pipeline(layers, mean_squared_error, world=world)
        export_safetensors(pipe, tmp_path / "ranks")
        pipe.save(tmp_path / "checkpoint")

    run_on_threads(stages, body)
    export_checkpoint(tmp_path / "checkpoint", layers, tmp_path / "one")
    plain = nn.ModuleDict({"layers": nn.ModuleList(layer.build() for layer in layers)})
    for folder in (tmp_path / "ranks", tmp_path / "one"):
        tensors: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            tensors |= safetensors.load_file(file)
        plain.load_state_dict(tensors, strict=True)
        first = "layers.1.a.weight" if kind == "within a layer" else "layers.0.token.weight"
        second = "layers.1.b.weight" if kind == "within a layer" else "layers.4.weight"
        assert torch.equal(tensors[first], tensors[second])
