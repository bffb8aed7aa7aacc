"""`checkpoint.resume=auto` goes on from the newest checkpoint that is whole, and says so."""

import json
import os
import shutil

import pytest
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import CheckpointError, ConfigError
from gpipe_hpc.trainer.run.folder import OWNER, Checkpoints
from gpipe_hpc.trainer.run.identity import run_id, write_run
from gpipe_hpc.trainer.run.resuming import newest_intact


@pytest.fixture
def steps(tmp_path):
    """Return the checkpoints of a run after 1, 2 and 3 steps, oldest first."""
    pipe = Pipeline([nn.Linear(2, 2)], nn.MSELoss())
    write_run(tmp_path, {})
    for step in (1, 2, 3):
        pipe.steps_done = step
        path = Checkpoints(tmp_path, 1).path(step)
        pipe.save(path, extra={OWNER: run_id(tmp_path)})
    return Checkpoints(tmp_path, 1).candidates("auto")[::-1]


def flip(path, name="__0_0.distcp", at=None):
    raw = bytearray((path / name).read_bytes())
    raw[len(raw) // 2 if at is None else at] ^= 8
    (path / name).write_bytes(raw)


def start(folder, resume="auto", is_restart=False, num_ranks=2):
    """Return from which step each rank would start, or what it is told."""

    def body(world):
        checkpoints = Checkpoints(folder, 1)
        try:
            found = newest_intact(checkpoints, resume, is_restart, world.world_group, world.rank)
        except CheckpointError as error:
            return str(error)
        return found and found.facts["steps_done"]

    found = run_on_threads(num_ranks, body)
    assert len(set(found)) == 1, found
    return found[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "gpipe_hpc.json"])
def test_a_damaged_newest_one_is_passed_over_with_a_warning(
    steps, tmp_path, caplog, name, num_ranks
):
    """It ended the run with a message; a damaged manifest was passed over without a word."""
    assert start(tmp_path, num_ranks=num_ranks) == 3
    assert not caplog.text
    flip(steps[2], name)
    assert start(tmp_path, num_ranks=num_ranks) == 2
    told = [r.getMessage() for r in caplog.records if r.name == "gpipe_hpc.train"]
    assert len(told) == 1, "one warning, of one rank"
    assert told[0].startswith(
        f"damaged checkpoint, resuming from {steps[1]} instead: checkpoint {steps[2]}: "
    )
    assert name in told[0]


def test_a_manifest_that_is_damaged_anywhere_is_not_passed_over_in_silence(steps, tmp_path):
    """Where the damage was in the name of the run, it was taken for another run's."""
    checkpoints, manifest = Checkpoints(tmp_path, 1), steps[2] / "gpipe_hpc.json"
    for at in range(manifest.stat().st_size):
        flip(steps[2], manifest.name, at)
        assert checkpoints.candidates("auto")[0] == steps[2], f"byte {at}"
        flip(steps[2], manifest.name, at)


def test_one_whose_run_cannot_be_read_any_more_is_set_aside(steps, tmp_path, caplog):
    """It stood in the way of the steps to come, as if another run had saved it."""
    at = (steps[2] / "gpipe_hpc.json").read_bytes().index(run_id(tmp_path).encode())
    flip(steps[2], "gpipe_hpc.json", at)
    assert start(tmp_path) == 2 and f"checkpoint {steps[2]}: " in caplog.text
    (aside,) = Checkpoints(tmp_path, 1).set_aside(steps[1])
    assert aside.name == f"abandoned_{steps[2].name}"


def test_each_damaged_one_is_named(steps, tmp_path, caplog):
    flip(steps[2])
    (steps[1] / ".metadata").unlink()
    assert start(tmp_path) == 1
    assert f"checkpoint {steps[2]}" in caplog.text and f"checkpoint {steps[1]}" in caplog.text


def test_where_none_is_whole_a_run_does_not_begin_anew_in_silence(steps, tmp_path):
    for path in steps:
        flip(path, "gpipe_hpc.json")
    text = start(tmp_path)
    assert f"checkpoint {steps[2]}: " in text
    assert "none of the 3 checkpoints is intact; to start over, set checkpoint.res" in text
    shutil.rmtree(steps[0])
    shutil.rmtree(steps[1])
    assert f"checkpoint {steps[2]}: " in start(tmp_path)
    assert start(tmp_path, resume="never") is None


def test_one_that_is_asked_for_by_its_path_is_taken_or_refused(steps, tmp_path):
    flip(steps[2])
    assert start(tmp_path, resume=str(steps[1])) == 2
    assert "__0_0.distcp" in start(tmp_path, resume=str(steps[2]))
    assert start(tmp_path, resume=str(tmp_path)) == 2, "of a run folder the newest whole one"


def test_a_launcher_that_starts_again_goes_on_from_its_own(steps, tmp_path):
    flip(steps[2])
    assert start(tmp_path, resume="never", is_restart=True) == 2
    assert start(tmp_path / "none", resume="never", is_restart=True) is None


def test_folders_that_are_no_checkpoints_are_none_that_are_damaged(steps, tmp_path, caplog):
    mine = tmp_path / "checkpoints" / "step_00000009"
    mine.mkdir()
    assert start(tmp_path) == 3
    (mine / "notes.txt").write_text("mine")
    assert start(tmp_path) == 3
    assert not caplog.text


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        Checkpoints(tmp_path, 1).candidates(str(tmp_path / "nowhere"))


def test_a_path_to_what_is_no_checkpoint_is_a_setting_that_cannot_be(tmp_path, monkeypatch):
    """An empty text, which is the folder that one is in, ended with code 1."""
    monkeypatch.chdir(tmp_path)
    message = r"bad checkpoint\.resume: '' is neither a checkpoint nor a run folder: .*; correct"
    with pytest.raises(ConfigError, match=message):
        Checkpoints(tmp_path / "run", 1).candidates("")
    (tmp_path / "gpipe_hpc.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad checkpoint\.resume.*written by gpipe_hpc"):
        Checkpoints(tmp_path / "run", 1).candidates(".")


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_whole_one(train, tiny, tmp_path, same_end):
    """The whole way, on two processes: to the bit what an unbroken run would have."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = (*tiny, "checkpoint.every=2", "checkpoint.keep=9", "train.steps=6")
    train(2, *settings, "run.dir=whole")
    train(2, *settings, "run.dir=run", "train.stop_at=4")
    newest = run / "checkpoints" / "step_00000004"
    flip(newest, "__1_0.distcp")
    said = train(2, *settings, "run.dir=run")
    assert f"damaged checkpoint, resuming from {run}/checkpoints/step_00000002" in said
    assert "__1_0.distcp is damaged: changed content in bytes" in said
    assert "abandoned_step_00000004" in said, "kept for whoever looks for the reason"
    same_end(whole, run)
    facts = json.loads((newest / "gpipe_hpc.json").read_text())
    assert facts["steps_done"] == 4
    assert os.path.isdir(run / "checkpoints" / "abandoned_step_00000004")
