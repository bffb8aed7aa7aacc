"""Processes that read ahead under a real run: however it ends, none of them stays."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STEPS = ("train.steps=100000", "run.dir=run", "data.workers=2")


def children(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.add(int(path.parent.name))
    return found


def alive(pids: set[int]) -> set[int]:
    """Return those of the processes that have not ended."""
    living = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                living.add(pid)
    return living


@pytest.fixture
def under_way(start, tiny, until):
    """Return a run that has come some steps far, and the two processes that read for it."""
    command = start(*tiny, *STEPS)
    until(lambda: re.search(r"step +\d+/100000", command.output), 60, "steps were done")
    readers = children(command.pid)
    assert len(readers) == 2
    return command, readers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_none_stays_when_the_run_is_ended(under_way, until, number):
    command, readers = under_way
    os.kill(command.pid, number)
    command.wait(30)
    assert command.code == 75 if number == signal.SIGTERM else command.code != 0
    until(lambda: not alive(readers), 15, "all readers ended")


def test_run_stops_at_the_edge_of_a_step_when_all_its_processes_are_told_to(under_way, until):
    """As Slurm does it: readers that obeyed would take the step under way with them."""
    command, readers = under_way
    for pid in {command.pid, *readers}:
        os.kill(pid, signal.SIGTERM)
    command.wait(30)
    assert command.code == 75, command.output
    until(lambda: not alive(readers), 15, "all readers ended")


def test_reader_that_is_killed_ends_the_run_with_a_word(under_way, until):
    command, readers = under_way
    os.kill(max(readers), signal.SIGKILL)
    command.wait(60)
    assert command.code == 1 and "DataLoader worker" in command.output
    until(lambda: not alive(readers), 15, "all readers ended")
