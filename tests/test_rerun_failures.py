"""Tests of rerun_failures.py, which runs failed tests again."""

import json
import subprocess
import sys

import pytest

from tests import rerun_failures

RACE = "from pathlib import Path\n\ndef test_race():\n    assert Path('second').exists()\n"


def first_run(folder, text):
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), "test_it.py"]
    assert subprocess.call(command, cwd=folder, stdout=subprocess.DEVNULL) == 1


def test_what_passes_alone_is_named(tmp_path, capfd):
    first_run(tmp_path, RACE)
    (tmp_path / "second").touch()
    assert rerun_failures.main(["--rootdir", str(tmp_path)], tmp_path) == 0
    assert "passed alone:\n  test_it.py::test_race" in capfd.readouterr().out


def test_what_fails_again_has_failed(tmp_path):
    first_run(tmp_path, RACE)
    assert rerun_failures.main(["--rootdir", str(tmp_path)], tmp_path) == 1


@pytest.mark.parametrize("num_files", [0, rerun_failures.MOST + 1])
def test_many_or_none_are_not_run(tmp_path, num_files, capfd):
    """No failed test means that the run itself ended early, for example by a pytest error."""
    path = tmp_path / rerun_failures.FAILED
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({f"test_{n}.py::test_it": True for n in range(num_files)}))
    assert rerun_failures.main([], tmp_path) == 1
    assert f"{num_files} tests of {num_files} files have failed" in capfd.readouterr().out


def test_a_start_that_many_tests_share_counts_once(tmp_path, capfd):
    """Regression: four ranks started too slowly, and 56 tests of one file were not run again."""
    cases = f"@pytest.mark.parametrize('case', range({rerun_failures.MOST + 1}))\n"
    text = RACE.replace("def test_race():", f"{cases}def test_race(case):")
    first_run(tmp_path, f"import pytest\n{text}")
    (tmp_path / "second").touch()
    assert rerun_failures.main(["--rootdir", str(tmp_path)], tmp_path) == 0
    assert capfd.readouterr().out.count("test_it.py::test_race[3]") == 2
