"""Whether all ranks see one run folder, and may write there."""

import os
import time

import pytest

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.preflight import folder as looked_at
from gpipe_hpc.preflight.folder import await_run, check_folder
from gpipe_hpc.trainer.run.identity import RunIdentity, write_run


def look(path, size=3, limit_s=10.0):
    return run_on_threads(
        size, lambda world: check_folder(world, path if world.rank == 0 else None, limit_s)
    )


def test_a_folder_that_all_share_is_as_it_was(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    assert look(tmp_path) == [tmp_path] * 3
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_new_folder_goes_again(tmp_path):
    assert look(tmp_path / "runs" / "new") == [tmp_path / "runs" / "new"] * 3
    assert os.listdir(tmp_path / "runs") == []


def test_a_rank_that_sees_nothing_of_it_is_named(tmp_path, monkeypatch):
    """Without a shared file system the first checkpoint was refused, after hours of training."""
    read = looked_at._text

    def blind(path):
        return "" if path.name.endswith("_2") else read(path)

    monkeypatch.setattr(looked_at, "_text", blind)
    with pytest.raises(
        ConfigError,
        match=r"run\.dir: rank 1 on \S+ does not see the file of rank 2 in .* after 0.3 s, so "
        r"ranks do not share this folder",
    ):
        look(tmp_path, limit_s=0.3)
    assert os.listdir(tmp_path) == []


def test_what_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir: rank 0 on \S+ cannot write to .*file/run"):
        look(tmp_path / "file" / "run")


def test_a_run_that_is_seen_is_not_waited_for(tmp_path):
    name = write_run(tmp_path, {})
    began_s = time.monotonic()
    await_run(RunIdentity(tmp_path, name, is_repeated=False), rank=1, limit_s=60.0)
    assert time.monotonic() - began_s < 30


def test_a_run_that_is_not_seen_is_told_with_its_folder(tmp_path):
    write_run(tmp_path, {})
    with pytest.raises(ConfigError, match=r"rank 7 on \S+ does not see the run\.json of rank 0"):
        await_run(RunIdentity(tmp_path, "f" * 32, is_repeated=False), rank=7, limit_s=0.1)
