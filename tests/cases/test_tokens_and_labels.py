"""Tokens that are not the model's, and labels that a loss has to shift, or has not."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError, GpipeError
from gpipe_hpc.models import causal_lm, token_cross_entropy
from gpipe_hpc.models.huggingface import huggingface_layers
from tests.support import losses, train_here

LENGTH = 6


def llama(vocabulary: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 16)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return {"model_type": "llama", "vocab_size": vocabulary, **sizes, **heads, **special}


@pytest.fixture(autouse=True)
def library() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")


def words_of(folder: Path, *own: str) -> tuple[str, ...]:
    cheap = ("pipeline.stages=1", "pipeline.microbatches=2", "pipeline.partition=uniform")
    steps = ("train.steps=1", "train.batch_size=4", "lr.warmup_steps=0", "train.validate_every=0")
    return ("model=huggingface", *cheap, *steps, f"run.dir={folder / 'run'}", *own)


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, tuple[str, ...]]:
    """Return settings of data that are the bytes of texts, by kind."""
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("some words, " * 200)
    lines.write_text(2000 * '{"text": "some words"}\n')
    return {
        "text": ("data=text", f"data.paths=[{text}]", "data.seq_len=6"),
        "jsonl": ("data=jsonl", f"data.paths=[{lines}]", "data.seq_len=6"),
        "python_source": ("data=python_source", f"data.root={Path(__file__).parent}"),
    }


@pytest.mark.parametrize("kind", ["text", "jsonl", "python_source"])
def test_bytes_are_refused_under_a_tokenizer_or_its_vocabulary(
    kind: str, texts: dict[str, tuple[str, ...]], tmp_path: Path
):
    """They were trained on as numbers of tokens."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(llama(1000)))
    words = words_of(tmp_path, *texts[kind], f"model.path={model / 'config.json'}")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM with a vocabulary of 1,000.*data=tok"):
        train_here(1, *words)
    (model / "config.json").write_text(json.dumps(llama(300)))
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"with its tokenizer, tokenizer\.json.*data=tok"):
        train_here(1, *words)


def test_bytes_train_under_a_vocabulary_of_bytes_and_numbers_under_any(
    texts: dict[str, tuple[str, ...]], tmp_path: Path
):
    file = tmp_path / "model" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(llama(257)))
    train_here(1, *words_of(tmp_path, *texts["jsonl"], f"model.path={file}"))
    file.write_text(json.dumps(llama(1000)))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    numbers = tmp_path / "numbers.bin"
    numbers.write_bytes(torch.arange(900).to(torch.int16).repeat(4).numpy().tobytes())
    tokens = ("data=tokens", f"data.paths=[{numbers}]", "data.seq_len=6", "data.vocab_size=1000")
    other = f"run.dir={tmp_path / 'other'}"
    train_here(1, *words_of(tmp_path, *tokens, f"model.path={file}", other))
    for run in ("run", "other"):
        assert json.loads((tmp_path / run / "summary.json").read_text())["last_step"] == 1


# Labels.


class Rows:
    """Items of tokens and labels; those of a prompt, the first of each, count for nothing."""

    def __init__(self, *, shifted: bool = False, named: bool = False) -> None:
        generator = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(3, 13, (40, LENGTH + 1), generator=generator)
        self.shifted, self.named = shifted, named

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        row = self.tokens[index]
        labels = row[1:].clone() if self.shifted else row[:-1].clone()
        labels[: 1 + index % 2] = -100
        inputs = {"input_ids": row[:-1], "attention_mask": torch.ones(LENGTH).long()}
        return (inputs if self.named else row[:-1]), labels


OWN = ("data=own", f"data._target_={__name__}.Rows", "data.validation_fraction=0")


def first_loss(folder: Path, function: Any, **of_rows: bool) -> float:
    """Return the loss of the first batch of a run by a loss that the test names, by hand."""
    rows = Rows(**of_rows)
    layers = huggingface_layers(llama(13))

    def body(world: Any) -> float:
        pipe = Pipeline(
            layers, function, stages=1, microbatches=2, partition="uniform", world=world
        )
        return pipe.evaluate(
            *map(torch.stack, zip(*(rows[i] for i in range(40)), strict=True))
        ).loss

    return run_on_threads(1, body)[0]


def trained(folder: Path, *own: str) -> float:
    """Return the loss of the only step, of one batch of all rows."""
    file = folder / "config.json"
    file.write_text(json.dumps(llama(13)))
    whole = ("train.batch_size=40", f"model.path={file}")
    train_here(1, *words_of(folder, *OWN, *own, *whole))
    return losses(folder / "run")[0]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("loss: ")]


@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_shifts_labels_that_are_not_shifted(
    shifted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Unshifted labels, as transformers takes them, taught a model to copy its input."""
    caplog.set_level(logging.INFO, "gpipe_hpc.train")
    right = token_cross_entropy if shifted else causal_lm
    found = trained(tmp_path, f"data.shifted={str(shifted).lower()}")
    assert found == pytest.approx(first_loss(tmp_path, right, shifted=shifted), rel=1e-6)
    (line,) = said(caplog)
    assert line.startswith(f"loss: {right.__name__} (position i predicts label i")
    assert "chosen by the targets" in line
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [each for each in warned if "labels" in each]


def test_labels_beside_named_inputs_are_seen_too(tmp_path: Path, caplog: Any):
    caplog.set_level(logging.INFO, "gpipe_hpc.train")
    found = trained(tmp_path, "data.named=true")
    assert found == pytest.approx(first_loss(tmp_path, causal_lm), rel=1e-6)


def test_the_log_names_the_loss_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It went on naming the one that the targets suggest."""
    caplog.set_level(logging.INFO, "gpipe_hpc.train")
    named = "loss._target_=gpipe_hpc.models.huggingface.causal_lm"
    trained(tmp_path, named)
    (line,) = said(caplog)
    assert line.startswith("loss: causal_lm (") and f"set by {named}" in line


def test_labels_are_not_shifted_twice(tmp_path: Path):
    named = "loss._target_=gpipe_hpc.models.huggingface.causal_lm"
    with pytest.raises(ConfigError, match=r"loss\._target_.*already shifted"):
        trained(tmp_path, named, "data.shifted=true")
    synthetic = ("data=synthetic", "data.seq_len=6", "data.vocab_size=13")
    with pytest.raises(ConfigError, match=r"loss\._target_.*already shifted"):
        path = f"model.path={tmp_path / 'config.json'}"
        train_here(1, *words_of(tmp_path, *synthetic, named, path))


def copier() -> list[LayerSpec]:
    return [LayerSpec(nn.Embedding, 13, 8), LayerSpec(nn.Linear, 8, 13)]


def test_what_may_be_meant_to_copy_trains_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Of a model of one's own nobody knows in which direction it looks."""
    own = ("model=own", f"model._target_={__name__}.copier")
    words = [word for word in words_of(tmp_path, *OWN) if word != "model=huggingface"]
    train_here(1, *words, *own)
    (warned,) = [r.getMessage() for r in caplog.records if "learns to copy" in r.getMessage()]
    assert "loss._target_=gpipe_hpc.models.causal_lm" in warned


@pytest.mark.parametrize("ranks", [1, 2])
def test_sequences_that_are_too_long_for_dynamic_angles_are_refused_at_the_start(
    ranks: int, tmp_path: Path
):
    """It was found in the first step."""
    file, numbers = tmp_path / "config.json", tmp_path / "numbers.bin"
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = {**llama(300), "max_position_embeddings": 8, "rope_parameters": rope}
    file.write_text(json.dumps(config))
    numbers.write_bytes(torch.arange(300).to(torch.int16).repeat(4).numpy().tobytes())
    data = ("data=tokens", f"data.paths=[{numbers}]", "data.vocab_size=300")
    words = (*words_of(tmp_path, *data), f"model.path={file}", f"pipeline.stages={ranks}")
    with pytest.raises(GpipeError) as found:
        train_here(ranks, *words, "data.seq_len=9")
    assert "at most 8 positions (max_position_embeddings), got 9" in str(found.value)
    assert "micro-batch 0" not in str(found.value)
    train_here(ranks, *words, "data.seq_len=8")
