"""Tests that failed in a crowd are tried once more: what fails again has failed."""

import json
import subprocess
import sys

import pytest

from tests import once_more

RACE = "from pathlib import Path\n\ndef test_race():\n    assert Path('second').exists()\n"


def first_run(folder, text):
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), "test_it.py"]
    assert subprocess.call(command, cwd=folder, stdout=subprocess.DEVNULL) == 1


def test_what_passes_alone_is_named(tmp_path, capfd):
    first_run(tmp_path, RACE)
    (tmp_path / "second").touch()
    assert once_more.main(["--rootdir", str(tmp_path)], tmp_path) == 0
    assert "passed alone:\n  test_it.py::test_race" in capfd.readouterr().out


def test_what_fails_again_has_failed(tmp_path):
    first_run(tmp_path, RACE)
    assert once_more.main(["--rootdir", str(tmp_path)], tmp_path) == 1


@pytest.mark.parametrize("num_failed", [0, once_more.MOST + 1])
def test_many_or_none_are_not_run(tmp_path, num_failed, capfd):
    """None: the run has ended without a word, as by a fault of pytest's."""
    path = tmp_path / once_more.FAILED
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({f"test_it.py::test_{n}": True for n in range(num_failed)}))
    assert once_more.main([], tmp_path) == 1
    assert f"{num_failed} tests have failed" in capfd.readouterr().out
