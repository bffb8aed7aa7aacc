"""A rank's helper process is killed or stopped: that is no failure of any rank."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support import has_begun, losses

REPLACED = re.compile(
    r"rank (\d) on \S+: its helper process (\d+), which watches \w+ ranks, (.*); process \d+ re"
)
LONG = ("train.steps=100000", "run.dir=run", "comm.silence_s=5")


def helpers(ranks):
    """Return the process numbers of the helpers, by rank; those that are there."""
    own = {str(command.pid): rank for rank, command in enumerate(ranks.commands)}
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if any("gpipe_hpc.comm.watchdog" in word for word in words) and words[-2] in own:
                found[own[words[-2]]] = int(folder.name)
    return found


def replaced(ranks):
    """Return what each rank has said of helpers that were replaced: (rank, pid, why)."""
    return [
        (int(rank), int(pid), why)
        for output in ranks.outputs
        for rank, pid, why in REPLACED.findall(output)
    ]


def has_all(ranks):
    return len(helpers(ranks)) == len(ranks.commands)


@pytest.mark.slow
def test_a_run_survives_the_end_of_helpers_and_still_notices_a_rank_that_hangs(
    start_ranks, tiny, tmp_path, until
):
    """Both ranks went on unwatched, or ended with one of them said to have died."""
    ranks = start_ranks(3, *tiny, *LONG)
    until(lambda: has_begun(tmp_path / "run"), 60, "it trains")
    first = helpers(ranks)
    assert sorted(first) == [0, 1, 2]
    for pid in first.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(replaced(ranks)) == 3, 10, "each rank has started another one")
    assert sorted(replaced(ranks)) == [(r, first[r], "was killed by SIGKILL") for r in range(3)]
    until(lambda: has_all(ranks), 5, "all have one")
    stopped = helpers(ranks)[1]
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: len(replaced(ranks)) == 4, 10, "it was replaced")
    rank, pid, why = next(each for each in replaced(ranks) if each[1] == stopped)
    assert (rank, "SIGSTOP" in why) == (1, True)
    until(lambda: has_all(ranks), 5, "all have one")
    os.kill(helpers(ranks)[1], 0)
    begun = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    until(lambda: has_begun(tmp_path / "run", begun + 20), 30, "it still trains")
    assert ranks.codes == [None] * 3, ranks.outputs
    assert all("PeerError" not in text and "lost" not in text for text in ranks.outputs)

    ranks.commands[2].signal(signal.SIGSTOP)
    for rank in (0, 1):
        assert ranks.commands[rank].wait(30).code == 1
        assert "rank 2 on " in ranks.outputs[rank] and "has been stopped" in ranks.outputs[rank]
    ranks.commands[2].signal(signal.SIGCONT)


@pytest.mark.parametrize("moment", [pytest.param("start", marks=pytest.mark.slow), "end"])
def test_helpers_that_are_killed_at_the_start_or_the_end_change_nothing(
    start_ranks, tiny, tmp_path, until, moment
):
    ranks = start_ranks(2, *tiny, "train.steps=6", "run.dir=run")
    if moment == "end":
        until(lambda: has_begun(tmp_path / "run", 5), 60, "it has done its steps")
    killed = {}
    while len(killed) < 2 and ranks.codes != [0, 0]:
        for rank, pid in helpers(ranks).items():
            if rank not in killed:
                killed[rank] = pid
                os.kill(pid, signal.SIGKILL)
    ranks.wait(60)
    assert ranks.codes == [0, 0], ranks.outputs
    assert len(losses(tmp_path / "run")) == 6
    if moment == "start":
        assert sorted(each[:2] for each in replaced(ranks)) == sorted(killed.items())
