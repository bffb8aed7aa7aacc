"""Four exercises of the course, as a student runs them; `make course-check` runs all."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("number", ["5", "7", "11", "13"])
def test_an_exercise_gives_its_number(number, repository, environ):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.course", number],
        cwd=repository,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nANSWER: " in done.stdout
    assert "picture: experiments/course/out/" in done.stdout
