"""Tests of `running`: exit codes of ranks under torchrun, and the end of a launcher that hangs."""

import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.generated.cases import Case
from tests.generated.running import Ended, codes_told, end_launcher, ranks_ended_badly


def told_of(codes, asked=()):
    """Return torchrun's report of failed ranks, created with torch's own classes.

    `asked` are the ranks that torchrun sent a signal before.
    """
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=99 + rank, exitcode=code, error_file="<N/A>")
        for rank, code in codes.items()
    }
    signals = [
        f"W1 api.py:1028] Sending process {99 + rank} closing signal SIGTERM" for rank in asked
    ]
    report = ChildFailedError("gpipe_hpc.train", failures)
    return "\n".join([*signals, "Traceback (most recent call last):", str(report)])


@pytest.mark.parametrize("codes", [{0: 2}, {0: 2, 1: 2}, {1: 4, 0: 1, 2: -9}])
def test_codes_are_those_that_torchrun_tells_of(codes):
    """Regression: codes were guessed from the ranks' output, so wrong codes went unnoticed."""
    assert codes_told(told_of(codes)) == codes
    ended_by_torchrun = {7: -15, 8: 143}
    assert codes_told(told_of(codes | ended_by_torchrun, asked=ended_by_torchrun)) == codes
    assert codes_told("", 3) == {0: 0, 1: 0, 2: 0}


def test_ranks_that_nobody_asked_to_end_have_codes_of_their_own():
    """Regression: a rank that ended by SIGTERM before torchrun sent one was ignored."""
    by_itself = {0: 2, 1: -15, 2: 143}
    assert codes_told(told_of(by_itself)) == by_itself
    assert codes_told(told_of(by_itself, asked=[2])) == {0: 2, 1: -15}
    assert codes_told(told_of(by_itself, asked=[0, 1, 2])) == {0: 2}


DEAF = "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def test_a_launcher_that_hangs_is_ended_with_its_ranks():
    """Regression: if the launcher ignored SIGTERM, a timeout error replaced the result."""
    rank = f"{DEAF}print('begun', flush=True); signal.pause()"
    # The launcher continues when its rank has ended, so that it cannot exit before the signal.
    code = f"{DEAF}subprocess.run([sys.executable, '-c', {rank!r}]); signal.pause()"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == "begun\n"
    # The output ends only when the rank, which inherited the pipes, has ended too.
    assert end_launcher(launcher, grace_s=0.2) == "" and launcher.returncode == -9


WORD = "pipeline.stages=7"
REFUSED = f"gpipe_hpc: config: {WORD}, expected 2, got 7; set it to 2\n"


@pytest.mark.parametrize(
    ("ended", "wrong"),
    [
        ([(2, REFUSED), (2, REFUSED)], []),
        ([(2, REFUSED), (None, "")], []),
        ([(2, REFUSED), (1, REFUSED)], ["several exit codes: {1, 2}", "exit code 1"]),
        ([(2, REFUSED), (2, "")], ["0 messages"]),
        ([(2, REFUSED)], ["1 ranks began"]),
        ([(None, REFUSED), (None, "")], ["no rank has ended by itself", "no rank has said"]),
        ([(2, REFUSED), (None, "Traceback (most recent call last):")], ["a traceback"]),
    ],
)
def test_ranks_that_end_otherwise_than_they_must_are_found(ended, wrong):
    found = [Ended(code, "", said) for code, said in ended]
    told = list(ranks_ended_badly(Case("train", (WORD,), 2), found))
    assert len(told) == len(wrong), told
    assert all(part in each for part, each in zip(wrong, told, strict=True)), told
