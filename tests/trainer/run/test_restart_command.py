"""The command that starts a run again is what the user typed, with the run's folder."""

import os
import shlex
from pathlib import Path

import pytest

from gpipe_hpc.trainer.run.restart_command import restart_command

WORDS = ("model=gpt", "pipeline.partition=[1,4]", "train.steps=9")
FOLDER = Path("runs/this").absolute()
SETTINGS = "model=gpt 'pipeline.partition=[1,4]' train.steps=9 run.dir=runs/this"


@pytest.fixture
def processes(tmp_path):
    """Return a function that writes the commands of a process and its ancestors, its own first."""

    def write(*commands):
        for number, words in enumerate(commands, start=1):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
            (folder / "stat").write_text(f"{number} (a name) with ) in it) S {number + 1} 0 0")
        return {"pid": 1, "proc": tmp_path}

    return write


def own(*ahead):
    return [*ahead, "-m", "gpipe_hpc.train", *WORDS]


def test_in_one_process(processes):
    place = processes(own("python3.11", "-X", "dev"), ["bash"])
    assert restart_command(FOLDER, WORDS, **place) == (
        f"python3.11 -X dev -m gpipe_hpc.train {SETTINGS}"
    )


def test_under_torchrun_with_its_own_arguments(processes, tmp_path, monkeypatch):
    """The system puts the interpreter ahead of a script: nobody has typed that."""
    script = tmp_path / "bin" / "torchrun"
    script.parent.mkdir()
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    flags = ("--standalone", "--nproc_per_node", "2")
    place = processes(
        own("/venv/bin/python", "-u"),
        own("/venv/bin/python", str(script), *flags),
        ["-bash"],
    )
    assert restart_command(FOLDER, WORDS, **place) == (
        f"torchrun --standalone --nproc_per_node 2 -m gpipe_hpc.train {SETTINGS}"
    )


def test_under_mpirun_which_has_helpers_between(processes):
    place = processes(
        own("python"),
        ["hydra_pmi_proxy", "--control-port", "host:1"],
        own("mpirun", "-n", "2", "py"),
    )
    assert restart_command(FOLDER, WORDS, **place).startswith("mpirun -n 2 py -m gpipe_hpc.train ")


def test_a_folder_that_was_typed_is_not_named_twice(processes):
    words = ("run.dir=mine", "train.steps=9")
    place = processes(["python", "-m", "gpipe_hpc.train", *words])
    assert restart_command(Path("mine").absolute(), words, **place) == (
        "python -m gpipe_hpc.train run.dir=mine train.steps=9"
    )


@pytest.mark.parametrize("word", ["checkpoint.resume=never", "+checkpoint.resume=elsewhere"])
def test_it_goes_on_with_what_was_saved_now(processes, word):
    """Word for word the command would have begun anew."""
    place = processes(["python", "-m", "gpipe_hpc.train", word])
    assert restart_command(FOLDER, [word], **place) == (
        "python -m gpipe_hpc.train run.dir=runs/this"
    )


def test_what_is_no_launcher_of_this_command_is_left_out(processes):
    """A job of a sweep, say: its command has other words."""
    place = processes(["python", "-m", "gpipe_hpc.train", "-m", "optimizer.lr=1,2"], ["bash"])
    found = shlex.split(restart_command(FOLDER, ["optimizer.lr=1"], **place))
    assert found[1:] == ["-m", "gpipe_hpc.train", "optimizer.lr=1", "run.dir=runs/this"]


def test_a_folder_elsewhere_is_named_whole(processes):
    place = processes(own("python"))
    assert restart_command(Path("/elsewhere/run"), WORDS, **place).endswith(
        " run.dir=/elsewhere/run"
    )


def test_the_ancestors_of_this_process_are_read():
    assert os.getpid() and restart_command(FOLDER, WORDS).endswith(SETTINGS)
