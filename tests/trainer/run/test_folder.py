"""A run's folder: its name, and which of the checkpoints in it are the run's own."""

import json
import os
import shutil

import pytest
from torch import nn

from gpipe_hpc import Pipeline
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.trainer.run.folder import (
    LAUNCHERS,
    OWNER,
    Checkpoints,
    Restart,
    default_run_folder,
    find_restart,
)
from gpipe_hpc.trainer.run.identity import RUN_FILE, run_id, write_run
from gpipe_hpc.trainer.run.launchers import own_launchers


@pytest.fixture
def save(tmp_path):
    """Return a function that saves checkpoints of a run under tmp_path; the run has begun."""
    pipe = Pipeline([nn.Linear(2, 2)], nn.MSELoss())
    write_run(tmp_path, {})

    def save_all(*steps, run=None):
        for step in steps:
            pipe.steps_done = step
            path = Checkpoints(tmp_path, 1).path(step)
            pipe.save(path, extra={OWNER: run or run_id(tmp_path)})

    return save_all


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_prune_touches_nothing_but_the_runs_own(save, tmp_path):
    """It deleted step_00000010.good and another run's .partial, and step_..._before_lr_change
    was taken for the newest."""
    save(10, 20, 30, 40)
    kept = tmp_path / "checkpoints"
    shutil.copytree(kept / "step_00000010", kept / "step_00000010.good")
    shutil.copytree(kept / "step_00000030", kept / "step_00000030_before_lr_change")
    shutil.copytree(kept / "step_00000030", kept / "step_9")
    shutil.copytree(kept / "step_00000030", kept / "abandoned_step_00000030_mine")
    os.symlink(kept / "step_00000010", kept / "step_00000005")
    (kept / "step_00000006").write_text("mine")
    (kept / "step_00000007").mkdir()
    (kept / "step_00000007" / "notes.txt").write_text("mine")
    save(8, run="another")
    (kept / "step_00000050.partial").mkdir()
    (kept / "step_00000050.partial" / "gpipe_hpc.json").write_text('{"extra": {"run": "another"}}')
    (kept / "step_00000060.partial").write_text("mine")
    before = set(names(tmp_path))
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() == kept / "step_00000040"
    checkpoints.prune()
    assert before - set(names(tmp_path)) == {"step_00000010", "step_00000020"}


def test_what_a_kill_cut_short_is_removed(save, tmp_path):
    save(10)
    kept = tmp_path / "checkpoints"
    (kept / "step_00000020.partial").mkdir()
    shutil.copytree(kept / "step_00000010", kept / "abandoned_step_00000010.partial")
    (kept / "step_00000030.partial").mkdir()
    told = json.dumps({"extra": {OWNER: run_id(tmp_path)}})
    (kept / "step_00000030.partial" / "gpipe_hpc.json").write_text(told)
    Checkpoints(tmp_path, keep=1).prune()
    assert names(tmp_path) == ["step_00000010"]


def test_a_folder_whose_content_says_another_step_is_not_taken(save, tmp_path):
    save(10)
    kept = tmp_path / "checkpoints"
    shutil.copytree(kept / "step_00000010", kept / "step_00000099")
    assert Checkpoints(tmp_path, keep=1).candidates("auto") == [kept / "step_00000010"]


def test_steps_of_nine_digits_come_after_those_of_eight(save, tmp_path):
    save(99999999, 100000000)
    Checkpoints(tmp_path, keep=1).prune()
    assert names(tmp_path) == ["step_100000000"]


def test_abandoned_checkpoints_are_pruned_too(save, tmp_path):
    """They were kept for ever."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(10, 20, 30, 40)
    aside = checkpoints.set_aside(checkpoints.path(10))
    assert [path.name for path in aside] == [f"abandoned_step_000000{n}" for n in (20, 30, 40)]
    for age_s, path in enumerate(aside):
        os.utime(path, (1000 - age_s, 1000 - age_s))
    save(20)
    checkpoints.prune()
    first, second = "abandoned_step_00000020", "abandoned_step_00000030"
    assert names(tmp_path) == [first, second, "step_00000010", "step_00000020"]


def test_an_older_versions_checkpoints_are_read_and_stay(save, tmp_path):
    pipe = Pipeline([nn.Linear(2, 2)], nn.MSELoss())
    checkpoints = Checkpoints(tmp_path, keep=1)
    pipe.steps_done = 5
    pipe.save(checkpoints.path(5))
    assert checkpoints.newest() == checkpoints.path(5)
    save(6, 7)
    checkpoints.prune()
    assert names(tmp_path) == ["step_00000005", "step_00000007"]


@pytest.mark.parametrize("kind", ["file", "link", "another run's", "another run's, cut short"])
def test_what_is_not_the_runs_and_in_its_way_is_refused_at_the_start(save, tmp_path, kind):
    save(10)
    checkpoints = Checkpoints(tmp_path, keep=2)
    way = checkpoints.path(20)
    if kind == "file":
        way.write_text("mine")
    elif kind == "link":
        way.symlink_to(checkpoints.path(10))
    elif kind == "another run's":
        save(20, run="another")
    else:
        way = way.with_name(way.name + ".partial")
        way.mkdir()
        (way / "gpipe_hpc.json").write_text('{"extra": {"run": "another"}}')
    assert checkpoints.newest() == checkpoints.path(10)
    before = names(tmp_path)
    with pytest.raises(
        ConfigError, match=f"{way.name} (does not belong to the run|belongs to another run)"
    ):
        checkpoints.set_aside(checkpoints.path(10))
    assert names(tmp_path) == before


def test_what_is_abandoned_takes_nobodys_name(save, tmp_path):
    save(10)
    kept = tmp_path / "checkpoints"
    (kept / "abandoned_step_00000010").mkdir()
    (kept / "abandoned_step_00000010" / "notes.txt").write_text("mine")
    (aside,) = Checkpoints(tmp_path, keep=2).set_aside(None)
    assert aside.name == "abandoned_step_00000010.2"
    assert (kept / "abandoned_step_00000010" / "notes.txt").exists()


def test_a_checkpoint_that_cannot_be_removed_is_told(save, tmp_path, caplog):
    save(10, 20)
    kept = tmp_path / "checkpoints"
    (kept / "step_00000010.partial").write_text("mine")
    Checkpoints(tmp_path, keep=1).prune()
    assert "cannot be removed" in caplog.text
    assert names(tmp_path) == ["step_00000010", "step_00000010.partial", "step_00000020"]


def test_a_name_that_leads_elsewhere_is_no_name(tmp_path):
    """Copies in memory lie in a folder of the run's name, which is removed at the end: run.json of
    a stranger's folder could have named any folder of the user."""
    for name in ("../../home", "/home", "", "0" * 31, 7):
        (tmp_path / RUN_FILE).write_text(json.dumps({"id": name}))
        assert run_id(tmp_path) is None
    assert run_id(tmp_path) is None
    given = write_run(tmp_path, {})
    assert run_id(tmp_path) == given


def test_steps_of_one_allocation_have_folders_of_their_own():
    job = {"SLURM_JOB_ID": "7"}
    assert default_run_folder(job).name == "slurm_7"
    assert default_run_folder(job | {"SLURM_STEP_ID": "0"}).name == "slurm_7_0"
    assert default_run_folder(job | {"SLURM_STEPID": "1"}).name == "slurm_7_1"
    # Slurm's own number of the batch script, which is no srun.
    assert default_run_folder(job | {"SLURM_STEP_ID": "4294967291"}).name == "slurm_7"


def test_restarts_by_a_launcher_and_by_a_mark_are_told_apart(tmp_path):
    assert find_restart(tmp_path, {}) == Restart(False, False)
    assert find_restart(tmp_path, {"SLURM_RESTART_COUNT": "2"}) == Restart(True, False)
    (tmp_path / "REQUEUE").touch()
    assert find_restart(tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"}) == Restart(False, True)


def test_an_agent_of_torchrun_that_was_there_before_starts_the_run_again(tmp_path):
    """Where hosts come torchrun counts no restart: checkpoint.resume=never began anew there."""
    write_run(tmp_path, {LAUNCHERS: ["host 7 12", "other 8 13"]})
    nothing = {"TORCHELASTIC_RESTART_COUNT": "0"}
    assert find_restart(tmp_path, nothing, {"third 1 1", "other 8 13"}).by_launcher
    assert not find_restart(tmp_path, nothing, {"third 1 1"}).by_launcher
    assert not find_restart(tmp_path, nothing).by_launcher
    ranks = [{"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": str(rank)} for rank in range(2)]
    (own,) = own_launchers(ranks[0])
    assert f" {os.getppid()} " in own and own_launchers(ranks[0]) == {own}
    assert not own_launchers(ranks[1]) and not own_launchers({})
