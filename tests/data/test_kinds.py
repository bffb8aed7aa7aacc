"""Adding a kind of data requires only its module and a preset in conf/ that names it."""

import shutil

import pytest
import torch

from gpipe_hpc.config import check_config, compose_config, conf_dir
from gpipe_hpc.config.help import help_of
from gpipe_hpc.data import open_data
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.plan import make_plan

FILE = """
from dataclasses import dataclass

import torch

from gpipe_hpc.settings import DataConfig, Shape, Shapes, refuse
from gpipe_hpc.data.synthetic import SyntheticSource


@dataclass
class StairsConfig(DataConfig):
    flights: int = 3

    def check(self):
        super().check()
        if self.flights < 1:
            raise refuse("data.flights", "1 or more", self.flights, "raise it")

    def shapes(self, num_samples):
        one = Shape("float32", (num_samples, 64))
        return Shapes(one, Shape("int64", (num_samples,)), "classification")

    def open(self, seed, spare):
        return SyntheticSource(Stairs(self.flights), Stairs(self.flights), "classification")


class Stairs:
    def __init__(self, flights):
        self.num_samples = flights

    def read_inputs(self, indices, epoch=0):
        return torch.tensor(indices, dtype=torch.float32)[:, None].expand(-1, 64)

    def read_targets(self, indices, epoch=0):
        return torch.tensor(indices)

    def digest(self):
        return str(self.num_samples)
"""
PRESET = """# Stairs.
_target_: stairs.StairsConfig
flights: 5 # steps
workers: 0 # threads
prefetch: 2 # batches
"""
MLP = ("model=mlp", "model.widths=[64,8,5]", "data=stairs")


@pytest.fixture
def new_kind(tmp_path, monkeypatch):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    (tmp_path / "stairs.py").write_text(FILE)
    (tmp_path / "conf" / "data" / "stairs.yaml").write_text(PRESET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GPIPE_HPC_CONF", str(tmp_path / "conf"))


def test_a_file_and_a_preset_make_a_kind(new_kind):
    """A new kind of data can be composed, checked, opened and planned."""
    config = compose_config(MLP)
    assert config.data.flights == 5
    assert check_config(config, 1) == []
    source = open_data(config.data)
    assert source.train.num_samples == 5
    assert torch.equal(source.train.read_targets([3, 1]), torch.tensor([3, 1]))
    assert "layers" in make_plan(compose_config([*MLP, "pipeline.stages=2"])).text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.flights=0", r"bad data\.flights, expected 1 or more"),
        ("data.flights=abc", r"bad data\.flights: Value 'abc'"),
        (
            "data.flight=3",
            r"data\.flight is not a setting of the chosen data.*did you mean data\.flights\?",
        ),
        ("data.paths=[a]", r"data\.paths is not a setting of the chosen data.*data=.*tokens"),
    ],
)
def test_its_settings_are_checked_as_those_of_all(new_kind, word, message):
    with pytest.raises(ConfigError, match=message):
        check_config(compose_config([*MLP, word]), 1)


def test_its_settings_are_in_the_help(new_kind):
    shown = help_of("train", ["all", "data=stairs"])
    assert "stairs" in shown and "data.flights=5" in shown


def test_a_preset_may_name_a_plain_data_set(new_kind, tmp_path):
    """Settings of the preset that data=own does not have are keywords of the user's function."""
    (tmp_path / "plain.py").write_text("def pairs(size):\n    return [([0.5], 1)] * size\n")
    text = "_target_: plain.pairs\nsize: 7\nvalidation_fraction: 0\n"
    (tmp_path / "conf" / "data" / "plain.yaml").write_text(text)
    config = compose_config(["model={_target_:my.build}", "data=plain"])
    assert open_data(config.data).train.num_samples == 7


def test_settings_of_an_older_run_name_a_kind_by_its_old_place():
    """The old path is concatenated, so that tools that move modules do not change it."""
    old = "gpipe_hpc." + "training.data.synthetic.SyntheticVectorsConfig"
    words = ("model=mlp", "data=synthetic_vectors")
    config = compose_config([*words, f"data._target_={old}", "data.width=7"])
    assert config.data == compose_config([*words, "data.width=7"]).data
