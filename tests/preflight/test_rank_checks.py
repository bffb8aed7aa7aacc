"""The look at all ranks just before the first step."""

import logging
import re
import resource
from dataclasses import replace

import pytest

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.config import compose_config
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.preflight.clocks import ClockBounds, ClockReading
from gpipe_hpc.preflight.rank_checks import OpenFiles, check_before_run, skew_text

LITTLE = RankForecast((0,), 1, 4, 0, 4, 8, 0, 0, 100, 0)


def said(caplog, planned, *words, size=3):
    """Return what a look of some ranks warns of."""
    config = compose_config(words)
    with caplog.at_level(logging.WARNING, "gpipe_hpc.train"):
        run_on_threads(size, lambda world: check_before_run(config, world, planned[world.rank]))
    return caplog.messages


def test_ranks_that_have_what_they_need_are_told_nothing(caplog):
    assert said(caplog, [LITTLE, LITTLE, None]) == []


def test_memory_that_ranks_lack_together_is_told_once(caplog):
    """What each is to hold would fit alone."""
    much = replace(LITTLE, activation_bytes=10**18)
    (told,) = said(caplog, [LITTLE, much, much])
    assert "ranks 0-2 will need" in told and "2000 PB more" in told
    assert "python -m gpipe_hpc.preflight" in told


def test_the_look_can_be_left_out(caplog):
    much = replace(LITTLE, activation_bytes=10**18)
    assert said(caplog, [much], "preflight.before_run=false", size=1) == []


@pytest.fixture
def few_files(monkeypatch):
    """Let processes have no more files open than now, and 10."""
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 128))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    return limits


def test_the_limit_of_open_files_is_raised_and_what_is_lacking_told(few_files, caplog):
    """A step that opens one file too many ends a run after its start has gone well."""
    files = OpenFiles.of(5)
    assert few_files == [(128, 128)]
    assert (files.rank, files.allowed, files.lack) == (5, 128, files.needed - 128)
    assert files.needed > 256
    (told,) = said(caplog, [None] * 3)
    # Threads of one process: whoever looks last may see one file more.
    assert re.match(r"open files: rank [012] on .* its limit is 128", told)


def test_clocks_far_apart_are_told_with_both_hosts():
    def attended(came_s):
        return ClockBounds(ClockReading(came_s, 4, "b"), ClockReading(100.0, 0, "a"))

    assert skew_text(attended(100.9)) is None
    told = skew_text(attended(103.0))
    assert told is not None
    assert "the clock of rank 4 on b is 3.0 s ahead of that of rank 0 on a" in told
