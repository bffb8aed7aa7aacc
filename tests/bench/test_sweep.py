"""A sweep's points, its table and plot; no test measures time."""

import json
import os
from pathlib import Path

import pytest

from gpipe_hpc.bench.figures import PointResult, table
from gpipe_hpc.bench.plot import draw
from gpipe_hpc.bench.running import measure
from gpipe_hpc.bench.sweep import Point, points, varied
from gpipe_hpc.config import check_timing, compose_config
from gpipe_hpc.errors import ConfigError

POINT = Point(2, 1, 16, 4, "gloo")


def test_points_are_all_combinations_and_what_is_not_named_is_the_runs_own():
    config = compose_config(["bench.ranks=[1,2]", "bench.batch_sizes=[8,16]", "comm.backend=gloo"])
    found = points(config)
    assert [(p.ranks, p.batch_size) for p in found] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert {(p.microbatches, p.backend, p.threads) for p in found} == {(8, "gloo", 1)}
    assert list(varied(found)) == ["ranks", "batch_size"]
    layout = compose_config(["pipeline.stages=2", "pipeline.replicas=2"])
    assert [p.ranks for p in points(layout)] == [4]


def test_numbers_below_one_are_refused():
    with pytest.raises(ConfigError, match=r"bench\.ranks, expected at least 1, got \[1, 0\]"):
        check_timing(compose_config(["bench.ranks=[1,0]"]))


def test_a_table_says_what_failed_and_how_much_faster_the_rest_is():
    slow = PointResult(POINT, (2.0, 4.0, 3.0), tokens=160, bubble=0.25, peak_bytes=(5_000_000,))
    fast = PointResult(
        POINT._replace(ranks=4), (1.0,), bubble=0.5, peak_bytes=(5_000_000, 6_000_000)
    )
    bad = PointResult(POINT._replace(batch_size=1), failed="exit code 2, gpipe_hpc: a|b")
    lines = table([slow, fast, bad]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| 3000 | 2000-4000 | 5.333 | 53.33 | 1.00 | 25.0 | 5 |" in lines[2]
    assert "| 3.00 | 50.0 | 5 / 6 |" in lines[3]
    assert "none: exit code 2, gpipe_hpc: a/b" in lines[4]
    assert json.loads(json.dumps(slow.as_dict()))["point"]["ranks"] == 2


def test_a_plot_needs_something_that_varies(tmp_path):
    one = PointResult(POINT, (1.0,))
    assert not draw([one], tmp_path / "none.svg")
    assert not draw([PointResult(POINT, failed="so")], tmp_path / "none.svg")
    more = [one, PointResult(POINT._replace(ranks=4), (0.5,))]
    assert draw([*more, PointResult(POINT._replace(backend="mpi"), (2.0,))], tmp_path / "two.svg")
    assert (tmp_path / "two.svg").read_text().count("<use") >= 3  # a mark for each point


@pytest.mark.slow
def test_a_point_that_takes_too_long_leaves_no_ranks_behind(tiny, tmp_path, monkeypatch):
    """torchrun was killed; its ranks trained on beside the points that came next."""
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, time\n"
        "def build(**_):\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "    time.sleep(3600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = [*tiny, "model._target_=mine.build"]
    assert "took longer" in measure(Point(2, 1, 8, 2, "auto"), words, 40).failed
    ranks = [path for path in tmp_path.iterdir() if path.name.isdecimal()]
    assert ranks, "none has begun: nothing is shown"
    assert not any(Path("/proc", path.name).exists() for path in ranks)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_points_run_in_processes_of_their_own_and_failures_say_why(tiny, tmp_path):
    words = [*tiny, "bench.steps=2", "bench.ranks=[1,2]", f"bench.out={tmp_path}"]
    found = measure(Point(2, 1, 8, 2, "auto"), words, 90)
    assert len(found.steps_s) == 2 and found.tokens == 8 * 16, found.failed
    assert len(found.peak_bytes) == 2 and 0 <= found.bubble < 1
    refused = measure(Point(2, 1, 8, 2, "nccl"), words, 110)
    assert not refused.steps_s and "nccl" in refused.failed
    assert "took longer" in measure(Point(1, 1, 8, 2, "auto"), words, 0.5).failed
