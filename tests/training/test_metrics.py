"""metrics.jsonl and TensorBoard: what a reader finds, also after kills and resumes."""

import json
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpipe_hpc.training.metrics import JsonLines, open_metrics


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
        "from gpipe_hpc.training.metrics import JsonLines; "
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
