"""Composing settings: presets, unknown keys, wrong types, and folders of presets."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from gpipe_hpc.config import check_config, compose_config, conf_dir, config_yaml, written
from gpipe_hpc.data.text import PythonSourceConfig
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import SGDConfig


def test_defaults_compose_and_pass_all_checks():
    config = compose_config()
    assert config.model["_target_"] == "gpipe_hpc.models.build_gpt"
    assert isinstance(config.data, PythonSourceConfig)
    assert check_config(config, world_size=2) == []


def test_schema_of_another_program_is_replaced_by_ours_once(monkeypatch):
    """A user's program may keep schemas in Hydra's store, too."""
    group = {"config.yaml": ConfigNode("config.yaml", OmegaConf.create({}), "schema", None, "his")}
    monkeypatch.setitem(ConfigStore.instance().repo, "schema", group)
    assert check_config(compose_config(), world_size=2) == []
    ours = group["config.yaml"].node
    compose_config()
    assert group["config.yaml"].node is ours


def test_preset_group_has_its_own_settings():
    config = compose_config(["optimizer=sgd", "optimizer.momentum=0.5"])
    assert config.optimizer == SGDConfig(lr=0.1, weight_decay=0.0, momentum=0.5, nesterov=False)


def test_model_sizes_follow_the_data():
    model = compose_config(["data.seq_len=77", "data.vocab_size=300"]).model
    assert (model["block_size"], model["vocab_size"]) == (77, 300)


@pytest.mark.parametrize(
    "override", ["pipeline.stage=2", "trian.steps=1", "data.seq_length=3", "optimizer.momentum=0.1"]
)
def test_unknown_key_is_rejected(override):
    with pytest.raises(ConfigError, match=re.escape(override.split("=")[0])):
        compose_config([override])


@pytest.mark.parametrize("override", ["++pipeline.stage=2", "+step=1", "++draw.costs.idle=1"])
def test_unknown_key_is_rejected_even_if_forced(override):
    name = override.lstrip("+").split("=")[0]
    with pytest.raises(ConfigError, match=f"unknown setting {re.escape(name)}, expected one of"):
        compose_config([override])


def test_wrong_type_is_rejected():
    with pytest.raises(
        ConfigError, match=r"bad train\.steps: Value 'many' .* could not be converted to Integer"
    ):
        compose_config(["train.steps=many"])


def test_sections_passed_to_functions_accept_any_key():
    config = compose_config(
        [
            "model._target_=my.build",
            "model.depth=3",
            "loss._target_=my.loss",
            "loss.beta=2",
            "pipeline.options.stages_per_rank=2",
        ]
    )
    assert config.model["depth"] == 3
    assert config.loss == {"_target_": "my.loss", "beta": 2}
    assert config.pipeline.options == {"stages_per_rank": 2}


def test_model_error_names_the_data_it_needs():
    with pytest.raises(ConfigError, match=r"data\.width.*data=synthetic_vectors"):
        compose_config(["model=mlp"])


def settings_in(section, *path):
    """Yield path and value of each setting of a config or section."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from settings_in(value, *path, field.name)
        else:
            yield (*path, field.name), value


@pytest.mark.parametrize(
    "words", [[], ["model=mlp", "data=synthetic_vectors", "optimizer=sgd", "optimizer.lr=0.3"]]
)
def test_config_yaml_contains_every_setting(words):
    config = compose_config([*words, "train.steps=7", "pipeline.partition=[5,6]"])
    saved = OmegaConf.to_container(OmegaConf.create(config_yaml(config)))
    assert saved["train"]["steps"] == 7 and saved["pipeline"]["partition"] == [5, 6]
    found = dict(settings_in(config))
    assert {section for section, *_ in found} == {field.name for field in fields(config)}
    for path, value in found.items():
        assert reduce(getitem, path, saved) == value, ".".join(path)


def test_conf_folder_of_the_environment_variable_is_used(tmp_path, monkeypatch):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    monkeypatch.setenv("GPIPE_HPC_CONF", str(tmp_path / "conf"))
    assert conf_dir() == tmp_path / "conf"


def test_conf_folder_of_another_program_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("defaults: []\n")
    monkeypatch.setenv("GPIPE_HPC_CONF", str(tmp_path))
    with pytest.raises(ConfigError, match=r"found no config\.yaml.*GPIPE_HPC_CONF"):
        conf_dir()


def test_composing_without_data_imports_no_torch(repository: Path):
    code = (
        "import sys; from gpipe_hpc.config import compose_config; "
        "compose_config(reads_data=False); "
        "assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model=mlp", "data=synthetic_vectors", "optimizer.lr=1e-5", "+model.note='1e3'"],
        ["+model.note='on: [1, 2]'", "+model.sizes=[1,[2.5,null]]", "pipeline.partition=[5,6]"],
        ["data=text", "data.paths=[a.txt]", "run.dir='${train.steps}'", "train.stop_at=null"],
    ],
)
def test_written_settings_equal_the_parsed_yaml(words):
    """Checkpoints use `written`, because parsing the YAML takes twice as long."""
    config = compose_config(words)
    assert written(config) == OmegaConf.to_container(OmegaConf.create(config_yaml(config)))
    assert json.loads(json.dumps(written(config))) == written(config)
