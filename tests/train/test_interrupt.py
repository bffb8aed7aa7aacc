"""Ctrl-C ends a run as SIGTERM does, wherever it comes, and says how to go on."""

import json
import shlex
import signal
import time

import pytest

pytestmark = pytest.mark.slow

MINE = """
import os
import time

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe_hpc import LayerSpec

write = FileSystemWriter.write_data
FIGURES = "run/metrics.jsonl"


def write_slowly(self, plan, planner):
    while not os.path.exists("pressed"):
        time.sleep(0.01)
    return write(self, plan, planner)


class Slow(nn.Linear):
    def __init__(self, where):
        super().__init__(8, 8)
        self.where = where

    def forward(self, x):
        if self.where == "fail":
            raise ValueError("what the user got wrong")
        if self.where == "validation" and not self.training:
            time.sleep(0.5)
        # In the second step: what runs a layer ahead of the first one is no step.
        if self.where == "step" and os.path.exists(FIGURES) and os.path.getsize(FIGURES):
            open("stepping", "w").close()
            time.sleep(60.0)
        return super().forward(x)


def build(where="nowhere"):
    if where == "start":
        open(f"building{os.environ.get('RANK', 0)}", "w").close()
        time.sleep(60)
    if where == "save":
        FileSystemWriter.write_data = write_slowly
    return [LayerSpec(Slow, where), LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8)]
"""
SETTINGS = (
    "model=mlp",
    "model._target_=mine.build",
    "data=synthetic_vectors",
    "data.width=8",
    "data.num_classes=8",
    "train.batch_size=8",
    "train.steps=100000",
    "train.validate_every=0",
    "pipeline.microbatches=2",
    "pipeline.partition=uniform",
    "pipeline.recompute=never",
    "checkpoint.every=0",
)


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def start_all(start, start_ranks, mine):
    """Return a function that starts as many processes; one needs no launcher."""

    def begin(number, *words):
        if number == 1:
            return [start(*SETTINGS, *words, env=mine)]
        return start_ranks(number, *SETTINGS, *words, env=mine).commands

    return begin


def press(commands):
    for command in commands:
        command.signal(signal.SIGINT)


def ended(commands, code):
    """Wait for the end of all; return what the first one said."""
    for command in commands:
        command.wait(30)
    outputs = [command.output for command in commands]
    assert [command.code for command in commands] == [code] * len(commands), outputs
    assert not any("Traceback" in output for output in outputs), outputs
    return outputs[0]


def begun(run):
    path = run / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) > 2


def steps(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [1, 2])
def test_in_a_step_a_checkpoint_is_written_and_the_command_goes_on(
    start_all, tmp_path, until, number
):
    """It left with a traceback and without a checkpoint; the folder was nowhere to be read."""
    commands = start_all(number)
    until(lambda: any(begun(r) for r in (tmp_path / "runs").glob("*")), 60, "it trains")
    press(commands)
    output = ended(commands, 75)
    (run,) = (tmp_path / "runs").iterdir()
    (last,) = checkpoints(run)
    done = int(last.removeprefix("step_"))
    assert f"stopped by SIGINT after step {done}" in output
    again = shlex.split(output.splitlines()[-1])
    assert again[1:3] == ["-m", "gpipe_hpc.train"]
    assert again[-1] == f"run.dir=runs/{run.name}" and "pipeline.partition=uniform" in again
    words = [word for word in again[3:] if word not in SETTINGS]
    later = start_all(number, *words, f"train.stop_at={done + 2}")
    assert f"step_{done:08d}: {done} steps done" in ended(later, 0)


@pytest.mark.parametrize("number", [1, 2])
def test_the_second_ends_at_once(start_all, tmp_path, until, number):
    """The test pressed ahead of the first step, where one press ends a run: no second was tried."""
    commands = start_all(number, "model.where=step", "run.dir=run")
    until((tmp_path / "stepping").exists, 60, "it is in a step")
    press(commands)
    until(lambda: "Ctrl-C again" in commands[0].output, 10, "the first press was heard")
    time.sleep(0.7)
    press(commands)
    assert "interrupted: ends now" in ended(commands, 130)
    assert not (tmp_path / "run" / "LOCK").exists(), "the folder is free"


@pytest.mark.parametrize("number", [1, 2])
def test_while_it_starts_nothing_is_left(start_all, tmp_path, until, number):
    """A folder in runs/ with settings, a lock and an empty log stayed for each."""
    commands = start_all(number, "model.where=start")
    until(lambda: len(list(tmp_path.glob("building*"))) == number, 60, "it builds the model")
    press(commands)
    assert "before the first step, so nothing is lost" in ended(commands, 130)
    assert not (tmp_path / "runs").exists()


def test_in_a_validation_the_rest_of_it_is_left(start_all, tmp_path, until):
    """Under SIGTERM it went on to the end, which may be later than a scheduler waits."""
    words = ("model.where=validation", "train.validate_every=3", "run.dir=run")
    commands = start_all(2, *words, "data.num_samples=20000")
    run = tmp_path / "run"
    until(lambda: run.exists() and (run / "metrics.jsonl").exists() and 3 in steps(run), 60, "3")
    time.sleep(0.5)
    press(commands)
    output = ended(commands, 75)
    assert "stopped by SIGINT after step 3;" in output and "validation loss" not in output
    assert checkpoints(run) == ["step_00000003"]


@pytest.mark.parametrize("background", ["false", "true"])
def test_in_a_save_that_checkpoint_is_the_last(start_all, tmp_path, until, background):
    """The step was saved twice, and the second time its name was taken."""
    words = ("model.where=save", "checkpoint.every=3", f"checkpoint.in_background={background}")
    commands = start_all(2, *words, "run.dir=run", "train.steps=4")
    run = tmp_path / "run"
    until(lambda: list(run.glob("checkpoints/*.partial")), 60, "it saves")
    press(commands)
    (tmp_path / "pressed").touch()
    output = ended(commands, 75)
    assert len(checkpoints(run)) in (1, 2) and "step_00000003" in checkpoints(run)
    assert f"after step {max(steps(run))};" in output


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("model.where=fail",), 1),  # in the first step
        (("data.width=7",), 2),  # as layers are counted
        (("data.width=7", "pipeline.partition=time"), 2),  # as layers are measured
        (("pipeline.partition=[1,1]",), 2),  # as the model is cut
        (("model.shape=round",), 2),  # as the model is built
    ],
)
def test_a_run_that_fails_before_its_first_step_leaves_no_folder(
    start, tmp_path, mine, words, code
):
    """Each mistake left a folder in runs/."""
    command = start(*SETTINGS, *words, env=mine)
    assert command.wait().code == code, command.output
    assert not list(tmp_path.glob("runs/*"))


def test_a_folder_that_was_named_stays(start, tmp_path, mine):
    assert start(*SETTINGS, "model.where=fail", "run.dir=run", env=mine).wait().code == 1
    assert (tmp_path / "run" / "logs" / "rank0.log").exists()


def test_a_folder_that_was_named_goes_where_its_settings_cannot_work(start, tmp_path, mine):
    """What a refused start had written looked like a run that was to go on."""
    words = (*SETTINGS, "data.width=7", "run.dir=new/one")
    command = start(*words, env=mine).wait()
    assert command.code == 2 and "model and data do not match" in command.output
    assert not (tmp_path / "new").exists()
