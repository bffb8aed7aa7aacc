"""The settings: what composes, what is refused and in which words, what only warns."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from gpipe_hpc.config import (
    PythonSourceConfig,
    SGDConfig,
    bind_target,
    build_target,
    check_config,
    compose_config,
    conf_dir,
    config_yaml,
)
from gpipe_hpc.errors import ConfigError


def test_defaults_compose_and_pass_all_checks():
    config = compose_config()
    assert config.model["_target_"] == "gpipe_hpc.models.build_gpt"
    assert isinstance(config.data, PythonSourceConfig)
    assert check_config(config, world_size=2) == []


def test_group_brings_its_own_settings():
    config = compose_config(["optimizer=sgd", "optimizer.momentum=0.5"])
    assert config.optimizer == SGDConfig(lr=0.1, weight_decay=0.0, momentum=0.5, nesterov=False)


def test_model_follows_the_data():
    model = compose_config(["data.seq_len=77", "data.vocab_size=300"]).model
    assert (model["block_size"], model["vocab_size"]) == (77, 300)


@pytest.mark.parametrize(
    "override", ["pipeline.stage=2", "trian.steps=1", "data.seq_length=3", "optimizer.momentum=0.1"]
)
def test_unknown_key_is_refused(override):
    with pytest.raises(ConfigError, match=re.escape(override.split("=")[0])):
        compose_config([override])


@pytest.mark.parametrize("override", ["++pipeline.stage=2", "+step=1", "++draw.costs.idle=1"])
def test_unknown_key_is_refused_even_when_forced(override):
    name = override.lstrip("+").split("=")[0]
    with pytest.raises(ConfigError, match=f"unknown setting {re.escape(name)}, expected one of"):
        compose_config([override])


def test_wrong_type_is_refused():
    with pytest.raises(ConfigError, match=r"bad train\.steps, expected a whole number"):
        compose_config(["train.steps=many"])


def test_sections_that_feed_functions_take_any_key():
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


def test_model_that_needs_other_data_says_which():
    with pytest.raises(ConfigError, match=r"data\.width.*data=synthetic_vectors"):
        compose_config(["model=mlp"])


REFUSED = [
    ("pipeline.microbatches=0", "pipeline.microbatches, expected at least 1, got 0"),
    ("pipeline.stages=3", "expected stages x replicas = world size"),
    ("pipeline.replicas=3", "expected stages x replicas = world size"),
    ("pipeline.schedule=gpip", "pipeline.schedule, expected one of gpipe, one_f_one_b"),
    ("pipeline.recompute=sometimes", "expected one of always, except_last, never"),
    ("pipeline.partition=fast", "expected time, parameters, uniform or the number of layers"),
    ("pipeline.partition=[1,2,3]", "expected 2 "),
    ("pipeline.partition=[-1,12]", "counts from 0 up"),
    ("pipeline.partition=null", "pipeline.partition"),
    ("train.batch_size=0", "train.batch_size, expected at least 1, got 0"),
    ("train.steps=-1", "train.steps, expected at least 0, got -1"),
    ("train.accumulation=0", "train.accumulation"),
    ("train.clip_norm=0", "train.clip_norm, expected more than 0"),
    ("train.device=gpu", "train.device, expected one of auto, cpu, cuda"),
    ("optimizer.lr=nan", "optimizer.lr"),
    ("optimizer.betas=[0.9]", "optimizer.betas, expected two numbers"),
    ("optimizer.betas=[0.9,1.0]", "optimizer.betas, expected two numbers"),
    ("lr.decay=linear", "lr.decay, expected one of cosine, constant"),
    ("lr.min_ratio=1.5", "lr.min_ratio, expected 0 to 1"),
    ("data.vocab_size=128", "data.vocab_size, expected 256 or more"),
    ("model.vocab_size=10", "model.vocab_size, expected at least data.vocab_size=256, got 10"),
    ("model.block_size=4", "model.block_size, expected at least data.seq_len"),
    ("~model._target_", "model, expected a _target_"),
    ("loss.beta=1", "loss, expected a _target_"),
    ("checkpoint.keep=0", "checkpoint.keep, expected at least 1"),
    ("comm.timeout_s=0", "comm.timeout_s, expected more than 0"),
    ("comm.backend=mpi", "comm.backend, expected one of"),
    ("draw.format=pdf", "draw.format, expected one of"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[each[0] for each in REFUSED])
def test_settings_that_cannot_work_are_refused_by_name(override, message):
    config = compose_config([override])
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(config, world_size=2)


@pytest.mark.parametrize("override", ["data.paths=[]", "data.dtype=int8"])
def test_text_settings_are_checked(override):
    config = compose_config(["data=text", "data.paths=[a.txt]", override])
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        check_config(config, world_size=2)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["pipeline.stages=2", "pipeline.replicas=2"], 4),
        (["pipeline.replicas=2"], 8),
        (["pipeline.partition=[3,8]"], 2),
        (["pipeline.partition=[3,3,3,2]"], 2),  # two stages a rank
        (["train.steps=0", "train.clip_norm=null"], 1),
    ],
)
def test_settings_that_work_pass(overrides, world_size):
    assert check_config(compose_config(overrides), world_size) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lr.warmup_steps=500", "train.steps=100"], "lr.warmup_steps=500 is longer"),
        (["train.stop_at=400"], "train.stop_at=400 lies after"),
        (["train.batch_size=7"], "some micro-batches stay empty"),
    ],
)
def test_doubtful_settings_warn(overrides, words):
    (warning,) = check_config(compose_config(overrides), world_size=2)
    assert words in warning


def test_yaml_of_a_run_holds_every_setting():
    config = compose_config(["train.steps=7", "pipeline.partition=[5,6]"])
    saved = OmegaConf.create(config_yaml(config))
    assert saved.train.steps == 7
    assert saved.pipeline.partition == [5, 6]
    assert saved.optimizer.betas == [0.9, 0.95]


def test_named_conf_folder_wins(tmp_path, monkeypatch):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    monkeypatch.setenv("GPIPE_HPC_CONF", str(tmp_path / "conf"))
    assert conf_dir() == tmp_path / "conf"


def test_conf_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("defaults: []\n")
    monkeypatch.setenv("GPIPE_HPC_CONF", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no settings found.*GPIPE_HPC_CONF"):
        conf_dir()


def test_composing_loads_no_torch(repository: Path):
    code = (
        "import sys; from gpipe_hpc.config import compose_config; compose_config(); "
        "assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Put a module with a user's own targets on the path."""
    (tmp_path / "own_targets.py").write_text(
        "def build(width, depth=1): return ('built', width, depth)\n"
        "def everything(**keywords): return keywords\n"
        "def loss(output, target, beta): return (output, target, beta)\n"
        "text = 'no function'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_targets"
    sys.modules.pop("own_targets", None)


def test_own_model_gets_those_preset_keywords_it_takes(own_module):
    model = compose_config([f"model._target_={own_module}.build", "model.depth=3"]).model
    assert build_target("model", model) == ("built", 128, 3)


def test_own_model_that_takes_everything_gets_everything(own_module):
    model = compose_config([f"model._target_={own_module}.everything", "model.depth=3"]).model
    assert build_target("model", model)["depth"] == 3


def test_own_model_needs_no_data_of_tokens(own_module):
    """The preset behind it, model=gpt, refers to data.vocab_size; it took the whole run down."""
    overrides = [f"model._target_={own_module}.build", "data=synthetic_vectors", "model.depth=3"]
    model = compose_config(overrides).model
    assert "vocab_size" not in model
    assert build_target("model", model)[2] == 3
    with pytest.raises(ConfigError, match=r"model\.size refers to a setting"):
        compose_config([*overrides, "model.size=${data.no_such}"])


def test_keyword_that_own_model_does_not_take_is_refused(own_module):
    model = compose_config([f"model._target_={own_module}.build", "model.dept=3"]).model
    with pytest.raises(ConfigError, match=r"does not take dept, expected some of width, depth"):
        build_target("model", model)


def test_a_keyword_of_another_preset_is_refused():
    """`depth` is U-Net's; a GPT with it once trained as if nothing had been said."""
    model = compose_config(["model=gpt", "model.depth=3"]).model
    with pytest.raises(ConfigError, match=r"does not take depth, expected some of vocab_size"):
        build_target("model", model)


def test_own_loss_keeps_its_keywords(own_module):
    loss = bind_target("loss", {"_target_": f"{own_module}.loss", "beta": 2})
    assert loss("a", "b") == ("a", "b", 2)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module.build", "ModuleNotFoundError"),
        ("own_targets.bild", "AttributeError"),
        ("build", "expected MODULE.FUNCTION"),
        ("own_targets.text", "cannot be called"),
    ],
)
def test_target_that_is_none_is_refused(own_module, path, words):
    with pytest.raises(ConfigError, match=words):
        build_target("model", {"_target_": path})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("comm.timeout_s=1e300", "at most 1000000 seconds"),
        ("comm.timeout_s=inf", "more than 0"),
        ("comm.timeout_s=nan", "more than 0"),
        ("comm.timeout_s=-1", "more than 0"),
        ("train.steps=9223372036854775808", "0 to 9223372036854775807"),
        ("pipeline.microbatches=100000000000000000000", "1 to 9223372036854775807"),
        ("train.log_every=0", "at least 1"),
    ],
)
def test_numbers_that_fit_no_clock_or_integer_are_refused(override, expected):
    """A time-out of 1e300 s became an OverflowError in the middle of the start."""
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*{expected}"):
        check_config(compose_config([override]), 1)
