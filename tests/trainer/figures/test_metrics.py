"""metrics.jsonl and TensorBoard: what a reader finds, also after kills and resumes."""

import errno
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from gpipe_hpc import Metrics, Pipeline, add_loss, add_metric, run_on_threads
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.errors import ConfigError, PeerError, RunFolderError
from gpipe_hpc.trainer.figures import metrics as metrics_module
from gpipe_hpc.trainer.figures.metrics import open_metrics
from gpipe_hpc.trainer.writers import JsonLines


def mean_square(output, target):
    return (output - target).square().mean()


def steps_of(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_a_step(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = JsonLines(path)
    log.write(1, {"loss": 2.5, "lr": 1e-3, "bubble": None})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 2.5, "lr": 1e-3, "bubble": None}
    log.write(2, {"loss": float("nan"), "grad_norm": float("inf")})
    log.close()
    assert json.loads(path.read_text().splitlines()[1]) == {
        "step": 2,
        "loss": None,
        "grad_norm": None,
    }


@pytest.mark.parametrize(("resumed", "kept"), [(0, []), (3, [1, 2, 3]), (9, [1, 2, 3, 4, 5])])
def test_resume_drops_what_came_after(tmp_path, resumed, kept):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    for step in range(1, 6):
        log.write(step, {"loss": 1.0})
    log.close()
    resumed_log = JsonLines(path, resumed)
    resumed_log.write(resumed + 1, {"loss": 1.0})
    resumed_log.close()
    assert steps_of(path) == [*kept, resumed + 1]


class Refusing:
    """A writer on a full disk, which has not written all when it is closed."""

    def __init__(self):
        self.num_closed = 0

    def write(self, step, scalars):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self, error=None):
        self.num_closed += 1
        self.write(0, {})


def test_a_full_disk_is_told_with_its_folder_and_a_remedy(tmp_path):
    """It was an OSError out of our files, and another one as they were closed."""
    full = JsonLines(tmp_path / "lines.jsonl", resumed_step=None)
    full.close()
    full._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    refusing = [Refusing(), Refusing()]
    told = rf"metrics: cannot write to {tmp_path}: .*No space left on device.*free some space"
    with (
        pytest.raises(RunFolderError, match=told),
        Metrics(*refusing, full, folder=tmp_path) as metrics,
    ):
        metrics.write(1, {"loss": 1.0})
    assert [each.num_closed for each in refusing] == [1, 1]
    with pytest.raises(RunFolderError, match=told), Metrics(*refusing, folder=tmp_path):
        pass
    assert [each.num_closed for each in refusing] == [2, 2]
    assert full._file.closed


def test_other_ranks_are_told_of_a_full_disk(tmp_path):
    """They heard that rank 0 had left the run, and not why."""

    def body(world):
        if world.rank:
            with pytest.raises(PeerError) as heard, collective_errors(world, "step 2"):
                world.world_group.all_reduce(torch.zeros(1))
            return str(heard.value)
        with (
            pytest.raises(RunFolderError),
            Metrics(Refusing(), folder=tmp_path, world=world) as metrics,
        ):
            metrics.write(1, {"loss": 1.0})
        return None

    _, heard = run_on_threads(2, body)
    assert re.match(r"rank 0( on \S+)?: metrics: cannot write to .*No space left", heard)


def test_a_line_is_whole_where_the_system_takes_it_in_parts(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path)
    taken = log._file.write
    monkeypatch.setattr(log, "_file", SimpleNamespace(write=lambda data: taken(data[:7])))
    log.write(1, {"loss": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.5}


def test_line_cut_short_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    log = JsonLines(path, resumed_step=2)
    log.write(3, {})
    log.close()
    assert steps_of(path) == [1, 3]


def test_lines_survive_a_process_that_dies(tmp_path, repository):
    code = (
        "import os, sys; from pathlib import Path; "
        "from gpipe_hpc.trainer.writers import JsonLines; "
        "JsonLines(Path(sys.argv[1])).write(1, {'loss': 1.0}); os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=repository, check=False)
    assert steps_of(path) == [1]


def test_tensorboard_has_the_same_scalars(tmp_path):
    with open_metrics(tmp_path) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"loss": 4.0 / step, "bubble": None})
    with open_metrics(tmp_path, resumed_step=2) as metrics:
        metrics.write(3, {"loss": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [
        (1, 4.0),
        (2, 2.0),
        (3, 9.0),
    ]
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_a_script_writes_its_own_on_rank_0(tmp_path):
    """`from gpipe_hpc import Metrics`: the trainer's writers were not for scripts."""

    def body(world):
        pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], mean_square, world=world)
        with Metrics.of(pipe, tmp_path / "mine") as metrics:
            for lr in (0.1, 0.2):
                result = pipe.step(torch.ones(2, 4), torch.zeros(2, 4))
                metrics.write(pipe.steps_done, result.scalars() | {"lr": lr})
        return result.loss

    losses = run_on_threads(2, body)
    lines = [
        json.loads(line) for line in (tmp_path / "mine/metrics.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["lr"]) for line in lines] == [(1, 0.1), (2, 0.2)]
    assert lines[-1]["loss"] == losses[0] == losses[1]
    assert list((tmp_path / "mine/tensorboard").glob("events.*"))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_script_has_the_pace_of_its_steps(tmp_path, monkeypatch):
    """Its lines had the loss alone."""
    pipe = Pipeline([nn.Linear(4, 4)], mean_square)
    now_s = 100.0
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: now_s)
    with Metrics.of(pipe, tmp_path) as metrics:
        now_s += 2.0
        metrics.write(1, {"loss": 1.0}, num_samples=64, grad_norm=torch.tensor(0.5))
        now_s += 100.0
        metrics.write(1, {"validation_loss": 3.0})
        now_s -= 100.0
        now_s += 3.0
        metrics.write(4, {"loss": np.float32(2.0), "steps": np.int64(3)}, num_samples=64)
        now_s += 1.0
        metrics.write(5, {"step_time_s": 7.0})
    assert lines_of(tmp_path) == [
        {"step": 1, "grad_norm": 0.5, "loss": 1.0, "step_time_s": 2.0, "samples_per_s": 32.0},
        {"step": 1, "validation_loss": 3.0},
        {"step": 4, "loss": 2.0, "steps": 3, "step_time_s": 1.0, "samples_per_s": 64.0},
        {"step": 5, "step_time_s": 7.0},
    ]


@pytest.mark.parametrize("value", ["high", torch.zeros(2), [1.0]], ids=repr)
def test_what_is_no_number_is_refused(tmp_path, value):
    pipe = Pipeline([nn.Linear(4, 4)], mean_square)
    with Metrics.of(pipe, tmp_path) as metrics, pytest.raises(ConfigError, match="metrics: note"):
        metrics.write(1, {"note": value})


def test_a_script_that_goes_on_drops_what_it_will_write_anew(tmp_path):
    pipe = Pipeline([nn.Linear(4, 4)], mean_square)
    for done, steps in ((0, 3), (1, 1)):
        pipe.restore_position(done, 1.0)
        with Metrics.of(pipe, tmp_path) as metrics:
            for _ in range(steps):
                result = pipe.step(torch.ones(2, 4), torch.zeros(2, 4))
                metrics.write(pipe.steps_done, result.scalars())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


class Reporting(nn.Linear):
    def forward(self, x):
        add_loss("penalty", x.square().mean())
        add_metric("spread", x.std(), weight=len(x))
        return super().forward(x)


def test_the_result_of_a_step_is_short_to_read():
    """It printed the tensor of all micro-batches' sums."""
    pipe = Pipeline([Reporting(4, 4)], mean_square)
    result = pipe.step(torch.ones(2, 4), torch.zeros(2, 4))
    assert repr(result) == (
        f"StepResult(loss={result.loss:.6g}, losses/main={result.losses['main']:.6g}, "
        f"losses/penalty={result.losses['penalty']:.6g}, metrics/spread=0, weight=2)"
    )
    assert repr(
        Pipeline([nn.Linear(4, 4)], mean_square).evaluate(torch.ones(2, 4), torch.ones(2, 4))
    )
