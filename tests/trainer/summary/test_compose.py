"""summary.json as a file: whole or not there, JSON whatever the numbers are."""

import json
import os
from types import SimpleNamespace

import pytest

from gpipe_hpc.config import compose_config
from gpipe_hpc.settings import MicrobatchSplit
from gpipe_hpc.trainer.summary import compose
from gpipe_hpc.trainer.summary.compose import MedianTrace, RunOutcome, write_summary


def test_what_is_no_number_becomes_null(tmp_path):
    path = write_summary(tmp_path, {"loss": float("nan"), "ranks": [{"a": float("inf"), "b": 1}]})
    assert json.loads(path.read_text()) == {"loss": None, "ranks": [{"a": None, "b": 1}]}


def test_a_reader_never_finds_half_a_file(tmp_path, monkeypatch):
    path = write_summary(tmp_path, {"outcome": "running"})
    seen = []

    def stop(source, destination):
        seen.append(json.loads(path.read_text()))
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(OSError, match="no space left"):
        write_summary(tmp_path, {"outcome": "done"})
    assert seen == [{"outcome": "running"}] == [json.loads(path.read_text())]


def test_a_run_that_was_stopped_spends_little_time_on_advice():
    """Its other ranks had left, and a launcher ends the last one soon after."""
    given = {}

    def advice(pipe, measured, finer, most_actions):
        given[outcome] = most_actions
        return []

    session = SimpleNamespace(
        config=compose_config([]),
        foreseen=SimpleNamespace(advice=advice),
        pipe=SimpleNamespace(layout=SimpleNamespace(portions=MicrobatchSplit())),
    )
    for outcome in ("done", "stopped"):
        assert (
            compose._advice(session, MedianTrace(1, 1.0, [None], "file"), RunOutcome(outcome)) == []
        )
    assert given["stopped"] <= given["done"] / 10
