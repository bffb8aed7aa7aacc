"""On a GPU the times of a step are told behind the next one: nothing waits for a clock."""

import pytest

from gpipe_hpc.trainer import loop
from gpipe_hpc.trainer.traces.files import read_replicas
from tests.support import metrics, train_here

TIMES = ("bubble", "pipeline_s", "reading_s", "edge_s", "clipping_s", "optimizer_s")


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(loop, "reports_late", lambda device: True)


def test_a_line_has_the_times_of_the_newest_step_that_is_known_to_be_done(tiny, tmp_path, late):
    """The edge waited for the device, and the device then for the host."""
    own = ("pipeline.stages=2", "train.clip_norm=1", "trace.steps=10", "trace.keep=all")
    train_here(2, *tiny, *own, "train.steps=4", f"run.dir={tmp_path}")
    first, second, *others = (line for line in metrics(tmp_path) if "loss" in line)
    assert [each["step"] for each in (first, second, *others)] == [1, 2, 3, 4]
    assert all(each[name] is None for each in (first, second) for name in TIMES)
    assert all(line[name] >= 0 for line in others for name in TIMES)
    traces = sorted((tmp_path / "trace").glob("step_*.json"))
    assert [path.stem[-1] for path in traces] == ["1", "2"]
    for path, line in zip(traces, others, strict=True):
        (timeline,) = read_replicas(path)
        assert line["pipeline_s"] == pytest.approx(timeline.makespan)
        assert line["bubble"] == pytest.approx(timeline.bubble)


def test_otherwise_a_line_has_its_own(tiny, tmp_path):
    train_here(2, *tiny, "pipeline.stages=2", "train.steps=3", f"run.dir={tmp_path}")
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert len(lines) == 3 and all(line[name] >= 0 for line in lines for name in TIMES)
