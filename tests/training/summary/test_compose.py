"""summary.json as a file: whole or not there, JSON whatever the numbers are."""

import json
import os

import pytest

from gpipe_hpc.training.summary.compose import write_summary


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
