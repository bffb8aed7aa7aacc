"""Traces as files: what comes back, and which of several is drawn."""

import json
from dataclasses import replace

import pytest

from gpipe_hpc.errors import DataError
from gpipe_hpc.schedule import Costs, Timeline, build, simulate
from gpipe_hpc.trainer.traces.files import (
    forget_later_traces,
    read_replicas,
    read_trace,
    typical_trace,
    write_planned,
    write_trace,
)


def measured(pace=1.0, start_s=0.0):
    timeline = simulate(
        build("gpipe", ranks=2, microbatches=2), Costs(forward=pace, backward=2 * pace)
    )
    rows = tuple(
        tuple(e._replace(start_s=e.start_s + start_s, end_s=e.end_s + start_s) for e in row)
        for row in timeline.events
    )
    return replace(timeline, events=rows)


def test_all_replicas_come_back_on_one_clock(tmp_path):
    path = write_trace([measured(1.0, 70.0), measured(2.0, 71.0)], tmp_path, 5)
    assert path == tmp_path / "trace" / "step_00000005.json"
    first, second = read_replicas(path)
    assert first == read_trace(path) == measured(1.0)
    assert second == measured(2.0, 1.0)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_file_of_before_replicas_is_read(tmp_path):
    path = write_trace([measured()], tmp_path, 5)
    content = json.loads(path.read_text())
    for name in ("num_replicas", "is_median", "step"):
        del content[name]
    path.write_text(json.dumps(content))
    assert read_trace(path) == measured()
    assert typical_trace(tmp_path) == path


def test_the_median_of_the_newest_start_is_drawn(tmp_path):
    for step, is_median in ((2, True), (7, False), (8, True), (9, False)):
        write_trace([measured()], tmp_path, step, is_median=is_median)
    write_planned(measured(), tmp_path)
    assert typical_trace(tmp_path).name == "step_00000008.json"
    (tmp_path / "trace" / "step_00000008.json").unlink()
    assert typical_trace(tmp_path).name == "step_00000002.json"


def test_steps_that_were_abandoned_leave_no_trace(tmp_path):
    """A run that went back to step 50 drew step 98 of the start before."""
    for step in (40, 50, 98):
        write_trace([measured()], tmp_path, step)
    forget_later_traces(tmp_path, 50)
    names = sorted(path.name for path in (tmp_path / "trace").iterdir())
    assert names == ["step_00000040.json", "step_00000050.json"]
    forget_later_traces(tmp_path / "nothing", 50)


def test_a_run_without_traces_says_how_to_get_them(tmp_path):
    with pytest.raises(DataError, match=r"trace\.steps=1 or more"):
        typical_trace(tmp_path)


def test_ranks_that_ran_nothing_are_kept(tmp_path):
    empty = Timeline(((), ()), 2, 2)
    assert read_trace(write_trace([empty], tmp_path, 1)).events == ((), ())
