"""Standard streams that close, fill up or lose their reader: training depends on none of them."""

import shlex
import subprocess
import sys

import pytest

from tests.support import losses

TRAIN = "-m gpipe_hpc.train"


def shell(words, tmp_path, environ):
    """Run a line of bash; return its exit code, and what it has printed."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def log(run, rank=0):
    return (run / "logs" / f"rank{rank}.log").read_text()


def test_a_full_disk_behind_both_streams_ends_no_training(start, tiny, tmp_path, until):
    """The run ended with code 1, and had saved nothing."""
    output = tmp_path / "output0.txt"
    output.symlink_to("/dev/full")
    try:
        command = start(*tiny, "train.steps=4", "run.dir=run")
        until(lambda: command.code is not None, 60, "it ended")
    finally:
        output.unlink()  # nobody may read it: it has no end
    assert command.code == 0
    assert len(losses(tmp_path / "run")) == 4
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()
    for stream in ("standard output", "standard error"):
        words = f"{stream} cannot be written (No space left on device); the run continues"
        assert log(tmp_path / "run").count(words) == 1


@pytest.mark.slow
def test_ranks_go_on_when_the_reader_of_their_output_has_ended(tiny, tmp_path, environ):
    """`torchrun ... | head -2` ended with code 1 from rich, without a word."""
    words = (*tiny, "train.steps=40", "train.log_every=1", "run.dir=run")
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2"
    line = f"{sys.executable} {torchrun} {TRAIN} {shlex.join(words)} 2>/dev/full | head -1"
    code, printed, _ = shell(line, tmp_path, environ)
    assert code == 0 and len(printed.splitlines()) == 1
    assert len(losses(tmp_path / "run")) == 40
    assert (tmp_path / "run" / "checkpoints" / "step_00000040").is_dir()
    assert "standard output cannot be written (Broken pipe)" in log(tmp_path / "run")


@pytest.mark.slow
def test_streams_that_are_closed_are_given_to_no_file(tiny, tmp_path, environ):
    """Their numbers went to sockets and files, into which was written what was to be printed."""
    words = (*tiny, "train.steps=2", "run.dir=run")
    line = f"{sys.executable} {TRAIN} {shlex.join(words)} <&- >&- 2>&-"
    assert shell(line, tmp_path, environ) == (0, "", "")
    for stream in ("standard output", "standard error"):
        assert f"{stream} is closed; the run continues" in log(tmp_path / "run")


@pytest.mark.parametrize(
    ("module", "end", "code", "words"),
    [
        ("gpipe_hpc.draw", "| head -1", 0, ""),
        ("gpipe_hpc.draw", ">/dev/full", 1, "cannot write to standard output: "),
        ("gpipe_hpc.draw", ">&-", 0, ""),
        ("gpipe_hpc", "| head -1", 0, ""),
        ("gpipe_hpc", ">/dev/full", 1, "No space left on device"),
    ],
)
def test_commands_that_print_end_as_others_do(tmp_path, environ, module, end, code, words):
    line = f"{sys.executable} -u -m {module} {end}"
    found, _, said = shell(line, tmp_path, environ)
    assert found == code
    assert words in said and "Traceback" not in said and bool(said) == bool(words)
