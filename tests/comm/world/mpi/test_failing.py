"""A rank that ends early under mpiexec: each other one says why it stops, once, and all end."""

import re
import signal

import pytest

pytestmark = pytest.mark.slow


def stops(output):
    """Return how often each rank says that it stops."""
    ranks = re.findall(r"^gpipe_hpc: rank (\d) stops", output, flags=re.M)
    return {rank: ranks.count(rank) for rank in sorted(set(ranks))}


def test_an_error_is_told_by_each_rank_once(mpiexec, repository):
    """mpiexec kills the others as soon as one has ended: they wait for one another's last words."""
    ended = mpiexec(4, repository / "tests/comm/world/mpi/failing.py", "raises")
    assert ended.code == 1
    assert ended.output.count("ValueError: a mistake of the user\n") >= 1
    assert stops(ended.output) == {"0": 1, "1": 1, "3": 1}
    assert "BAD TERMINATION" not in ended.output


def test_a_rank_that_leaves_is_named_by_those_that_wait_for_it(mpiexec, repository):
    """They waited for comm.timeout_s: MPI tells nobody that a process is at its end."""
    ended = mpiexec(4, repository / "tests/comm/world/mpi/failing.py", "leaves")
    assert ended.code != 0
    assert stops(ended.output) == {"0": 1, "1": 1, "3": 1}
    assert "rank 2 has left" in ended.output


def test_kill_9_of_a_rank_ends_all(mpiexec, repository):
    """MPICH's launcher kills the others at once, so it is its own message that names the process.

    The fixture waits until no rank has its output open any more: none outlives the launcher.
    """
    ended = mpiexec(4, repository / "tests/comm/world/mpi/failing.py", "is killed")
    assert ended.code == signal.SIGKILL
    assert re.search(r"PID \d+ RUNNING AT", ended.output)
    assert "Killed (signal 9)" in ended.output and "Traceback" not in ended.output
