"""The folder of a run that is refused before its first step."""

from pathlib import Path

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import ActionError, ConfigError
from gpipe_hpc.training.run.opening import own_folder
from gpipe_hpc.training.signals import StopRequest


def failing(folder, error):
    """Take the folder of a run, write into it, and fail."""
    config = compose_config() if folder is None else compose_config([f"run.dir={folder}"])
    with pytest.raises(type(error)), own_folder(config, StopRequest()) as lock:
        (lock.folder / "config.yaml").write_text("model: gpt")
        raise error


def test_a_refused_start_leaves_nothing_of_what_it_made(tmp_path, monkeypatch):
    """An empty runs/ stayed, and of a named folder the settings that had been refused."""
    monkeypatch.chdir(tmp_path)
    failing(None, ConfigError("no"))
    failing("made/for/it", ConfigError("no"))
    assert not list(Path().iterdir())


def test_what_was_there_before_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    failing(tmp_path / "mine" / "run", ConfigError("no"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
    failing(tmp_path / "mine", ConfigError("no"))
    assert (tmp_path / "mine" / "notes").exists()


def test_a_named_folder_of_a_run_that_failed_stays_with_its_log(tmp_path):
    failing(tmp_path / "run", ActionError("a layer failed"))
    assert (tmp_path / "run" / "config.yaml").exists()
