"""A process is bound and freed again, with its threads; what reads data goes everywhere."""

import os
import subprocess
import sys
import threading

import pytest

from gpipe_hpc.device.cores.inherited import (
    bind_process,
    inherited_cpus,
    use_inherited_cpus,
    user_chose_threads,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux binds")


def test_threads_that_run_are_moved_and_brought_back_and_readers_are_not_kept():
    before = os.sched_getaffinity(0)
    one = frozenset({max(before)})
    ready, done = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), done.wait()))
    other.start()
    ready.wait()
    undo = bind_process(one)
    try:
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == one
        assert inherited_cpus() == before
        seen = []
        reader = threading.Thread(
            target=lambda: (use_inherited_cpus(), seen.append(os.sched_getaffinity(0)))
        )
        reader.start()
        reader.join()
        assert seen == [before]
        code = (
            "import os; from gpipe_hpc.device.cores.inherited import use_inherited_cpus as g; "
            "print(sorted(os.sched_getaffinity(0))); g(); print(sorted(os.sched_getaffinity(0)))"
        )
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert told.stdout.splitlines() == [str(sorted(one)), str(sorted(before))], told.stderr
    finally:
        undo()
        done.set()
        assert os.sched_getaffinity(other.native_id) == before
        other.join()
    assert os.sched_getaffinity(0) == before == inherited_cpus()


def test_what_a_stranger_was_given_is_not_ours(monkeypatch):
    """A command that a bound rank's shell started later, under another number, heeds nothing."""
    monkeypatch.setenv("GPIPE_HPC_GIVEN_CPUS", "1:700-800")
    assert inherited_cpus() == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("environ", "agents", "is_chosen"),
    [
        ({}, b"", False),
        ({"OMP_NUM_THREADS": "3"}, b"", True),
        ({"MKL_NUM_THREADS": "3"}, b"", True),
        ({"OMP_NUM_THREADS": "1"}, b"", True),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, b"A=1\0B=OMP_NUM_THREADS\0", False),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, b"OMP_NUM_THREADS=1\0B=2\0", True),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, b"B=2\0OMP_NUM_THREADS=1\0", True),
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, b"", True),
        ({"TORCHELASTIC_RUN_ID": "x"}, b"", False),
    ],
)
def test_the_thread_that_torchrun_sets_by_itself_is_no_wish(tmp_path, environ, agents, is_chosen):
    agent = tmp_path / "environ"
    agent.write_bytes(agents)
    assert user_chose_threads(environ, agent) == is_chosen


def test_an_agent_that_cannot_be_asked_leaves_the_variable_a_wish(tmp_path):
    environ = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert user_chose_threads(environ, tmp_path / "nothing")
