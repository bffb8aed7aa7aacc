"""Tests of `model=huggingface` in the commands: plan, train and export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.config import build_target, compose_config
from gpipe_hpc.data import open_data
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import loss_function
from gpipe_hpc.plan import make_plan
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest

DATA = ("data=synthetic", "data.seq_len=6", "data.vocab_size=13")


@pytest.fixture
def config_file(configs: Any, tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(configs["llama"]))
    return file


def test_yaml_trains_two_steps(config_file: Path):
    config = compose_config(["model=huggingface", f"model.path={config_file}", *DATA])
    source = open_data(config.data)
    inputs, targets = source.train.read_inputs(range(4)), source.train.read_targets(range(4))
    layers = build_target("model", config.model)

    def body(world: Any) -> list[float]:
        pipe = Pipeline(
            layers,
            loss_function(source.loss),
            microbatches=2,
            partition="time",
            example=(inputs[:2], targets[:2]),
            world=world,
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(inputs, targets).loss)
            optimizer.step()
        return losses

    first, second = run_on_threads(2, body)
    assert first == second
    assert 0 < first[1] < first[0]


def test_it_is_planned_without_values(config_file: Path):
    config = compose_config(["model=huggingface", f"model.path={config_file}", *DATA])
    text = make_plan(config).text
    assert "4,560 parameters" in text
    assert "HuggingFaceBlock" in text


def test_larger_vocabulary_of_data_is_refused(config_file: Path, tmp_path: Path):
    """Regression: the vocabularies of config and data were not compared, so a step failed."""
    settings = ["model=huggingface", f"model.path={config_file}", *DATA, "data.vocab_size=1000"]
    config = compose_config([*settings, f"run.dir={tmp_path}/run"])
    message = r"data\.vocab_size=1000 is too large: .* embeddings for \d\d tokens"
    with pytest.raises(ConfigError, match=message):
        make_plan(config)
    with pytest.raises(ConfigError, match=message):
        run_on_threads(2, lambda world: run_training(config, world, StopRequest()))


def test_missing_path_names_the_setting(library: Any):
    config = compose_config(["model=huggingface", *DATA])
    with pytest.raises(ConfigError, match=r"no model is given; set model\.path"):
        build_target("model", config.model)


@pytest.mark.slow
def test_run_is_trained_exported_and_read(
    library: Any,
    config_file: Path,
    tmp_path: Path,
    train: Callable[..., str],
    start: Callable[..., Any],
):
    run = tmp_path / "run"
    train(
        2,
        "model=huggingface",
        f"model.path={config_file}",
        *DATA,
        "train.steps=2",
        "train.batch_size=4",
        "train.validate_every=0",
        "pipeline.microbatches=2",
        "pipeline.partition=parameters",
        f"run.dir={run}",
    )
    settings = (f"run.dir={run}", "export.dtype=bfloat16")
    command = start(*settings, module="gpipe_hpc.export").wait(60)
    assert command.code == 0, command.output
    folder = run / "exported" / "step_00000002"
    assert str(folder) in command.output
    model, info = library.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and str(model.dtype) == "torch.bfloat16"
    # The exported folder can be trained again.
    train(
        1,
        "model=huggingface",
        f"model.path={folder}",
        *DATA,
        "train.steps=1",
        "train.batch_size=4",
        "train.validate_every=0",
        "pipeline.microbatches=1",
        "pipeline.partition=parameters",
        f"run.dir={tmp_path / 'next'}",
    )
    assert sum(p.numel() for p in model.parameters()) == 4560
    # A second export to the same folder is refused, and so is a folder that is no run.
    for wrong in (run, tmp_path / "nowhere"):
        failed = start(f"run.dir={wrong}", module="gpipe_hpc.export").wait(60)
        assert failed.code == 2
        assert "gpipe_hpc: " in failed.output and "export" in failed.output
