"""A script of several ranks that fails prints one message, and torchrun shows the cause last."""

import json
import os
import re
import signal
import subprocess
import sys
from weakref import WeakSet

import pytest

from gpipe_hpc.comm.transport.slots import Slot
from gpipe_hpc.comm.watchdog.uncaught import install_failure_hook, install_start_hook
from gpipe_hpc.errors import ConfigError, PeerError

SCRIPT = """
import os
import signal
import sys

import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.start import start_world

# Shells start what runs in the background with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

kind, rank = sys.argv[1], int(os.environ["RANK"])


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward")


class Layer(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(*sizes), nn.ReLU())

    def forward(self, x):
        if kind == "layer":
            raise KeyError("missing in the layer")
        return self.parts(Fails.apply(x) if kind == "backward" else x)


def mean_square(output, target):
    if kind == "loss":
        raise ValueError("refused by the loss")
    return (output - target).square().mean()


settings = {"microbatches": 2}
if kind == "setting":
    settings["buffers"] = "mean"
if kind == "scripts":
    settings["microbatches"] += rank
if kind == "keyword":
    settings["schedul"] = "gpipe"
if kind == "waiting":
    settings["timeout_s"] = -1
if kind == "reach":
    start_world(reach_s=-1)
if kind == "replicas":
    settings["replicas"] = 3
width = 5 if kind == "shape" else 4
pipe = Pipeline([LayerSpec(nn.Linear, 4, 4), LayerSpec(Layer, width, 4)], mean_square, **settings)
for step in range(10**9 if kind == "interrupted" else 3):
    pipe.step(torch.zeros(4, 4), torch.zeros(4, 4))
    if step == 1:
        print("under way", flush=True)
    if kind == "between" and rank == 1:
        raise RuntimeError("the user's own, between two steps")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def failed(start_ranks, script):
    """Return a function that runs the script on two ranks; it returns the lines of each."""

    def run(kind, **env):
        ranks = start_ranks(2, kind, module="script", env=env).wait()
        assert ranks.codes == [1, 1], ranks.outputs
        return [_plain(output) for output in ranks.outputs]

    return run


def _plain(output):
    """Return the lines of an output without torch's names of ranks."""
    lines = [line.partition("]: ")[2] or line for line in output.splitlines() if line]
    return [line for line in lines if line != "under way"]


IN_LAYERS = [
    ("layer", "layers.1 (Layer): KeyError: 'missing in the layer'"),
    ("shape", "layers.1 (Layer): RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ("backward", "ValueError: in the backward"),
    ("loss", "loss_fn (mean_square): ValueError: refused by the loss"),
]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        IN_LAYERS[0],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in IN_LAYERS[1:]),
        ("between", "RuntimeError: the user's own, between two steps"),
    ],
)
def test_the_others_say_one_line(failed, kind, words):
    """They showed 50 lines of ConnectionResetErrors each, and the cause last.

    What failed in a layer was shown twice, with a dozen frames of torch in between.
    """
    first, second = failed(kind)
    assert second[0].startswith("Traceback") and words in second[-1]
    assert sum(line.startswith("Traceback") for line in second) == 1, second
    frames = [line for line in second if line.lstrip().startswith("File ")]
    assert not any("/gpipe_hpc/" in line or "/torch/" in line for line in frames), second
    assert sum("script.py" in line for line in frames) == (1 if kind == "between" else 2)
    (line,) = first
    begins = "gpipe_hpc: rank 0 stops because another rank failed: rank 1"
    assert line.startswith(begins) and words in line


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("setting", "bad buffers, expected one of average, first, each, got 'mean'"),
        ("scripts", "the same microbatches on every rank, got 2 on rank 0 and 3 on rank 1"),
        ("keyword", "Pipeline: unknown keyword schedul, expected one listed"),
        pytest.param("waiting", "timeout_s: ", marks=pytest.mark.slow),
        pytest.param("reach", "reach_s: ", marks=pytest.mark.slow),
        pytest.param("replicas", "3", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_of_all_ranks_is_shown_once(failed, kind, words):
    short, long = sorted(failed(kind), key=len)
    assert words in long[-1] and long[0].startswith("Traceback")
    (line,) = short
    assert line.startswith("gpipe_hpc: rank ") and " stops too: " in line and words in line


def test_ctrl_c_is_one_line_for_each_rank(start_ranks, script, until):
    """A rank that waited for another showed Gloo's text, and its own frames, beside the script's.

    Each is told by its terminal, and once more by its launcher.
    """
    ranks = start_ranks(2, "interrupted", module="script")
    until(lambda: all("under way" in output for output in ranks.outputs), 60, "both train")
    for _ in range(2):
        for each in ranks.commands:
            each.signal(signal.SIGINT)
    ranks.wait()
    assert ranks.codes == [-signal.SIGINT] * 2, ranks.outputs
    for rank, output in enumerate(ranks.outputs):
        (line,) = _plain(output)
        assert re.fullmatch(rf"gpipe_hpc: rank {rank} was interrupted( at script.py:\d+)?", line)


IN_A_DESTRUCTOR = """
import os
import signal
import time

from gpipe_hpc.comm.watchdog.uncaught import install_start_hook

signal.signal(signal.SIGINT, signal.default_int_handler)
install_start_hook(0, 2)


class Lease:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


Lease()
time.sleep(60)
"""


def test_ctrl_c_in_a_destructor_is_not_lost(tmp_path, repository):
    """Python showed it as an exception that it ignores, and the rank went on."""
    (tmp_path / "script.py").write_text(IN_A_DESTRUCTOR)
    ended = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    line = len(IN_A_DESTRUCTOR.splitlines())
    # It may come again before the next line begins.
    said = f"gpipe_hpc: rank 0 was interrupted at script.py:({line - 1}|{line})\n"
    assert re.fullmatch(said, ended.stderr), ended.stderr
    assert ended.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param(lambda: json.loads("{"), id="python's"),
        pytest.param(lambda: Slot(0, 1, None), id="generated"),
        pytest.param(lambda: WeakSet({1}), id="frozen"),
    ],
)
def test_the_others_hear_of_a_line_of_the_users(monkeypatch, fails):
    """They heard of one of Python's own files, or of code without a file, which he did not call."""
    hooked(monkeypatch, rank := Rank(1, is_first_failure=False))
    with pytest.raises((ValueError, TypeError)) as caught:
        fails()
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert rank.told[0].startswith("rank 1: test_uncaught.py:")


@pytest.mark.slow
def test_all_is_shown_when_asked_for(failed):
    first, second = failed("layer", GPIPE_HPC_TRACEBACK="full")
    assert any("/gpipe_hpc/" in line for line in second)
    assert any("ConnectionError" in line for line in first)


def torchrun(folder, environ, script):
    """Return how two ranks under torchrun have ended, of which one has failed in a layer."""
    arguments = ["--standalone", "--nproc_per_node=2", script, "layer"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.slow
def test_torchrun_shows_the_cause_last(script, environ):
    """It said no more than an exit code, and where to read about error files."""
    ended = torchrun(script, environ, "script.py")
    assert ended.returncode == 1
    report = ended.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in report and "layers.1 (Layer): KeyError" in report, ended.stderr
    # The traceback stands above, by the rank itself.
    assert ended.stderr.count('raise KeyError("missing in the layer")') == 1
    assert ended.stderr.count("Traceback") == 2  # and torchrun's own
    assert "rank 0 stops" in ended.stderr.partition("Failures:")[2].partition("Root Cause")[0]


@pytest.fixture(autouse=True)
def _own_interrupts():
    """Put Python's handler of Ctrl-C back."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


class Rank:
    """One that can tell others."""

    def __init__(self, rank, *, is_first_failure):
        self.rank, self.told, self._speaks = rank, [], is_first_failure

    @property
    def is_first_failure(self):
        return self._speaks if self.told else None

    def fail(self, report):
        self.told.append(report)


def hooked(monkeypatch, *worlds, at=1, size=2):
    """Return a list of what the hook that was there before prints, with ours around it."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    install_start_hook(at, size)
    for each in worlds:
        install_failure_hook(each)
    return printed


def end_with(error):
    try:
        raise error
    except Exception as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (PeerError("rank 1: step 2: waited in vain"), []),
        (PeerError("rank 10: step 2: failed"), ["another rank failed: rank 10: step 2"]),
    ],
)
def test_a_rank_whose_own_report_stands_shows_where_it_waited(monkeypatch, capsys, error, lines):
    """It said that another had failed, and nobody showed a line of the script."""
    printed = hooked(monkeypatch, rank := Rank(1, is_first_failure=True))
    end_with(error)
    assert printed == ([] if lines else [error]) and not (lines and rank.told)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(lines) and all(
        words in line for words, line in zip(lines, said, strict=True)
    )


def test_the_others_say_where_another_failed_and_not_all_that_it_said(monkeypatch, capsys):
    """They said all of it once more, its table and remedy included, 600 characters long."""
    place = "rank 1, stage 1, micro-batch 0, action 1F0"
    told = f"{place} (table: 1RECV_F0 -> 1F0 <- 1B0): loss_fn (one): TypeError: {'long ' * 99}"
    hooked(monkeypatch, Rank(0, is_first_failure=False), at=0)
    end_with(PeerError(told))
    (line,) = capsys.readouterr().err.splitlines()
    why = f"another rank failed: {place}: loss_fn (one): TypeError: long"
    begins = f"gpipe_hpc: rank 0 stops because {why}"
    assert line.startswith(begins) and line.endswith(" ...") and len(line) < 220


@pytest.mark.parametrize("is_first_failure", [True, False])
def test_a_script_with_two_pipelines_tells_the_ranks_of_both(monkeypatch, capsys, is_first_failure):
    """The hooks stood within one another, and the inner one printed a line of its own."""
    worlds = [Rank(1, is_first_failure=is_first_failure), Rank(1, is_first_failure=True)]
    printed = hooked(monkeypatch, *worlds)
    end_with(error := ValueError("mine"))
    assert [len(each.told) for each in worlds] == [1, 1]
    assert all("ValueError: mine" in each.told[0] for each in worlds)
    said = capsys.readouterr().err
    assert (
        (printed, said) == ([error], "")
        if is_first_failure
        else not printed and said.count("\n") == 1
    )


@pytest.mark.parametrize("rank", range(3))
def test_a_mistake_before_the_ranks_are_together_is_shown_by_rank_0(monkeypatch, capsys, rank):
    printed = hooked(monkeypatch, at=rank, size=3)
    end_with(error := ConfigError("timeout_s: bad"))
    said = capsys.readouterr().err
    line = f"gpipe_hpc: rank {rank} stops too: ConfigError: timeout_s: bad\n"
    assert (printed, said) == (([error], "") if rank == 0 else ([], line))
    end_with(error := ValueError("the script's own"))
    assert printed[-1] is error


@pytest.mark.parametrize(("stderr", "told"), [(None, "words"), (subprocess.DEVNULL, "whole")])
def test_torchrun_has_the_traceback_where_nothing_else_shows_it(tmp_path, repository, stderr, told):
    """It was always shown twice; with the ranks' output in files the report is all there is."""
    code = "from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error as tell; "
    code += "tell('words', is_cause=True, whole='frames\\nwhole')"
    path = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(path), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], cwd=repository, env=env, stderr=stderr, check=True)
    found = json.loads(path.read_text())["message"]
    assert found["message"] == told
    assert found["extraInfo"]["py_callstack"].splitlines()[-1] == told


def test_torchruns_root_cause_is_the_rank_that_failed(tmp_path, monkeypatch):
    """torchrun counts whole seconds, and of two in one second it takes the lower rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error

    failures = {}
    for rank, (is_cause, text) in enumerate([(False, "rank 0 stops"), (True, "the cause")]):
        path = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        monkeypatch.setattr("time.time", lambda: 1000.5)
        write_torchrun_error(text, is_cause=is_cause)
        assert json.loads(path.read_text())
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(path))
    assert ChildFailedError("script", failures).get_first_failure()[0] == 1


def test_a_cause_that_is_told_late_keeps_the_time_of_its_first_words(tmp_path, monkeypatch):
    """The rank that failed printed so long that one which stopped for it had an earlier time."""
    from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    for moment, text in [(1000.5, "rank 1: KeyError"), (1003.2, "KeyError: the whole of it")]:
        monkeypatch.setattr("time.time", lambda now=moment: now)
        write_torchrun_error(text, is_cause=True)
    told = json.loads(path.read_text())["message"]
    assert told["message"] == "KeyError: the whole of it"
    assert told["extraInfo"]["timestamp"] == "1000"


@pytest.mark.slow
def test_the_first_words_are_left_before_the_others_hear(tmp_path, environ, script):
    """A rank that is ended while it prints has told torchrun what failed."""
    mark = "from gpipe_hpc.comm.watchdog.failure import FailureBoard as Board; import os, pathlib; "
    mark += "publish = Board.publish; path = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']); "
    mark += (
        "Board.publish = lambda self, report: (print(path.read_text()), publish(self, report))[1]"
    )
    (script / "marked.py").write_text(f"{mark}\nimport runpy; runpy.run_path('script.py')\n")
    ended = torchrun(script, environ, "marked.py")
    assert "missing in the layer" in ended.stdout, ended.stderr
