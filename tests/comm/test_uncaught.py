"""A script of several ranks that fails prints one message, and torchrun shows the cause last."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import os
import sys

import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline

kind, rank = sys.argv[1], int(os.environ["RANK"])


class Layer(nn.Linear):
    def forward(self, x):
        if kind == "layer":
            raise KeyError("missing in the layer")
        return super().forward(x)


def mean_square(output, target):
    return (output - target).square().mean()


settings = {"microbatches": 2}
if kind == "setting":
    settings["buffers"] = "mean"
if kind == "scripts":
    settings["microbatches"] += rank
pipe = Pipeline([LayerSpec(nn.Linear, 4, 4), LayerSpec(Layer, 4, 4)], mean_square, **settings)
for step in range(3):
    pipe.step(torch.zeros(4, 4), torch.zeros(4, 4))
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
    return [line.partition("]: ")[2] or line for line in output.splitlines() if line]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("layer", "layers.1 (Layer): KeyError: 'missing in the layer'"),
        ("between", "RuntimeError: the user's own, between two steps"),
    ],
)
def test_the_others_say_one_line(failed, kind, words):
    """They showed 50 lines of ConnectionResetErrors each, and the cause last."""
    first, second = failed(kind)
    assert second[0].startswith("Traceback") and words in second[-1]
    assert not any("/gpipe_hpc/" in line for line in second), second
    (line,) = first
    assert line.startswith("gpipe_hpc: rank 0 stops, as another failed: rank 1") and words in line


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("setting", "pipeline.buffers: expected one of average, first, each, got 'mean'"),
        ("scripts", "the same microbatches on every rank, got 2 on rank 0 and 3 on rank 1"),
    ],
)
def test_a_mistake_of_all_ranks_is_shown_once(failed, kind, words):
    short, long = sorted(failed(kind), key=len)
    assert words in long[-1] and long[0].startswith("Traceback")
    (line,) = short
    assert line.startswith("gpipe_hpc: rank ") and " stops too: " in line and words in line


@pytest.mark.slow
def test_all_is_shown_when_asked_for(failed):
    first, second = failed("layer", GPIPE_HPC_TRACEBACK="full")
    assert any("/gpipe_hpc/" in line for line in second)
    assert any("ConnectionError" in line for line in first)


@pytest.mark.slow
def test_torchrun_shows_the_cause_last(script, environ):
    """It said no more than an exit code, and where to read about error files."""
    arguments = ["--standalone", "--nproc_per_node=2", "script.py", "layer"]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=script,
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 1
    report = ended.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in report and "layers.1 (Layer): KeyError" in report, ended.stderr
    assert 'raise KeyError("missing in the layer")' in report
    assert "rank 0 stops" in ended.stderr.partition("Failures:")[2].partition("Root Cause")[0]


def test_torchruns_root_cause_is_the_rank_that_failed(tmp_path, monkeypatch):
    """torchrun counts whole seconds, and of two in one second it takes the lower rank."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from gpipe_hpc.comm.torchrun_report import tell_torchrun

    failures = {}
    for rank, (is_cause, text) in enumerate([(False, "rank 0 stops"), (True, "the cause")]):
        path = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        monkeypatch.setattr("time.time", lambda: 1000.5)
        tell_torchrun(text, is_cause=is_cause)
        assert json.loads(path.read_text())
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(path))
    assert ChildFailedError("script", failures).get_first_failure()[0] == 1
