"""A script saves by step into one folder: names, the newest, and how many stay."""

import json
import os
import time

import numpy as np
import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, latest, run_on_threads
from gpipe_hpc.errors import CheckpointError, ConfigError


def mean_square(output, target):
    return (output - target).square().mean()


def pipeline(world=None, fill=0.0):
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mean_square, world=world)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.fill_(fill)
    return pipe


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def value_in(path):
    pipe = pipeline(fill=-1.0)
    pipe.load(path)
    return pipe.parameters()[0].flatten()[0].item()


def test_the_newest_stay_and_are_found(tmp_path):
    pipe = pipeline()
    for step in range(10, 60, 10):
        saved = pipe.save(tmp_path / "mine", step=step, keep=2)
    assert saved == tmp_path / "mine" / "step_00000050" == latest(tmp_path / "mine")
    assert names(tmp_path / "mine") == ["step_00000040", "step_00000050"]


def test_all_stay_where_nothing_is_said(tmp_path):
    pipe = pipeline()
    for step in (1, 2, 3):
        pipe.save(tmp_path, step=step)
    assert len(names(tmp_path)) == 3


def test_several_ranks_save_one_checkpoint(tmp_path):
    def body(world):
        pipe = pipeline(world, fill=1.0)
        return [pipe.save(tmp_path, step=step, keep=1) for step in (1, 2)]

    assert len(set(map(tuple, run_on_threads(2, body)))) == 1
    assert names(tmp_path) == ["step_00000002"] and value_in(latest(tmp_path)) == 1.0


def test_a_step_that_is_there_is_replaced(tmp_path):
    """A script that is started again saves the same steps: it failed after its whole run."""
    for fill in (1.0, 2.0):
        pipeline(fill=fill).save(tmp_path, step=7)
    assert names(tmp_path) == ["step_00000007"] and value_in(latest(tmp_path)) == 2.0


def test_one_that_is_replaced_comes_back_if_the_new_one_fails(tmp_path):
    pipeline(fill=1.0).save(tmp_path, step=7)
    with pytest.raises(CheckpointError, match="saved and loaded exactly"):
        pipeline(fill=2.0).save(tmp_path, extra={"function": print}, step=7)
    assert names(tmp_path) == ["step_00000007"] and value_in(latest(tmp_path)) == 1.0


def test_a_script_that_went_back_keeps_what_it_writes(tmp_path):
    """By number, what it has just written would be the first to go."""
    pipe = pipeline()
    for age_s, step in ((20, 70), (10, 80), (0, 60)):
        saved = pipe.save(tmp_path, step=step, keep=2)
        moment_s = time.time() - age_s
        os.utime(saved / "gpipe_hpc.json", (moment_s, moment_s))
    assert names(tmp_path) == ["step_00000060", "step_00000080"]
    assert latest(tmp_path).name == "step_00000060"


def test_what_is_not_whole_is_passed_over(tmp_path):
    pipe = pipeline()
    for step in (1, 2, 3):
        pipe.save(tmp_path, step=step)
    for path in (tmp_path / "step_00000003").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-1])
    assert latest(tmp_path).name == "step_00000002"
    (tmp_path / "step_00000002" / "gpipe_hpc.json").unlink()
    assert latest(tmp_path).name == "step_00000001"


def test_nothing_is_found_where_nothing_is(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None


def test_nothing_else_is_removed_or_replaced(tmp_path):
    pipe = pipeline()
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "notes.txt").write_text("mine")
    (tmp_path / "best").mkdir()
    for step in (2, 3):
        pipe.save(tmp_path, step=step, keep=1)
    assert names(tmp_path) == ["best", "step_00000001", "step_00000003"]
    with pytest.raises(CheckpointError, match=r"step_00000001 .* contains notes.txt; move it away"):
        pipe.save(tmp_path, step=1)
    assert (tmp_path / "step_00000001" / "notes.txt").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"step": -1},
        {"step": 1, "keep": 0},
        {"keep": 3},
        {"step": "a"},
        {"step": 1.5},
        {"step": True},
        {"step": torch.tensor(1.5)},
        {"step": 1, "keep": "all"},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(tmp_path, settings):
    """Texts ended in a TypeError of a comparison in here."""
    with pytest.raises(ConfigError, match="save: "):
        pipeline().save(tmp_path, **settings)


@pytest.mark.parametrize("step", [7, np.int64(7), torch.tensor(7)], ids=repr)
def test_whole_numbers_of_all_kinds_are_steps(tmp_path, step):
    assert pipeline().save(tmp_path, step=step).name == "step_00000007"


def test_a_name_that_is_taken_proposes_another(tmp_path):
    """The message named none, at the end of a run that could not save."""
    pipe = pipeline()
    pipe.save(tmp_path / "last")
    pipe.save(tmp_path / "last_2")
    with pytest.raises(CheckpointError) as caught:
        pipe.save(tmp_path / "last")
    assert f"{tmp_path / 'last_3'} is free" in str(caught.value)
    assert "pipe.save(folder, step=...)" in str(caught.value)
    assert json.loads((tmp_path / "last" / "gpipe_hpc.json").read_text())
