"""Messages under way: who tests, and what ends a wait."""

import threading
import time

import pytest
import torch

from gpipe_hpc.comm.world.mpi.progress import MpiProgress


class Requests:
    """An MPI whose requests are done when a test says so."""

    def __init__(self):
        self.done, self.gone, self.begun = {}, set(), 0
        self.fails = False

    def begin(self, part):
        self.begun += 1
        return self.begun - 1

    def ask(self, requests):
        if self.fails:
            raise RuntimeError("a truncated message")
        ready = [(at, self.done[each]) for at, each in enumerate(requests) if each in self.done]
        return ready

    def progress(self):
        return MpiProgress(self.ask, lambda rank: rank in self.gone)


@pytest.fixture
def mpi():
    return Requests()


def started(progress, mpi, num_parts=1, *, is_receive=True):
    parts = [torch.zeros(4, dtype=torch.uint8) for _ in range(num_parts)]
    return progress.start(3, parts, mpi.begin, is_receive=is_receive)


def test_a_message_is_done_once_all_its_parts_are(mpi):
    progress = mpi.progress()
    message = started(progress, mpi, 2)
    mpi.done[0] = 4
    progress.test()
    assert not message.is_done
    mpi.done[1] = 4
    message.wait(5.0)
    assert message.is_done


def test_what_comes_with_other_bytes_is_refused(mpi):
    """MPI lets a message be shorter than what it is received into."""
    message = started(mpi.progress(), mpi)
    mpi.done[0] = 3
    with pytest.raises(RuntimeError, match="expected 4 bytes from rank 3, got 3"):
        message.wait(5.0)


def test_a_thread_tests_where_nobody_waits(mpi):
    message = started(mpi.progress(), mpi)
    called = threading.Event()
    message.when_done(called.set)
    mpi.done[0] = 4
    assert called.wait(10.0)


def test_waits_end_with_the_run(mpi):
    progress = mpi.progress()
    message = started(progress, mpi)
    threading.Timer(0.1, progress.break_off, ["another rank has failed"]).start()
    with pytest.raises(RuntimeError, match="another rank has failed"):
        message.wait(30.0)
    with pytest.raises(RuntimeError, match="another rank has failed"):
        started(progress, mpi)


def test_waits_end_in_time(mpi):
    message = started(mpi.progress(), mpi)
    with pytest.raises(RuntimeError, match=r"rank 3 timed out after 0\.2 s"):
        message.wait(0.2)


def test_a_rank_that_has_left_is_not_waited_for(mpi):
    """What it sent before may come behind the word that it leaves, so it is looked at twice."""
    progress = mpi.progress()
    message, other = started(progress, mpi), started(progress, mpi)
    mpi.gone.add(3)
    threading.Timer(0.7, mpi.done.setdefault, [0, 4]).start()
    message.wait(30.0)
    with pytest.raises(RuntimeError, match="rank 3 has left"):
        other.wait(30.0)


def test_an_error_of_mpi_ends_all(mpi):
    progress = mpi.progress()
    first, second = started(progress, mpi), started(progress, mpi)
    mpi.fails = True
    for message in (first, second):
        with pytest.raises(RuntimeError, match="MPI: a truncated message"):
            message.wait(5.0)


def test_the_thread_ends_with_what_it_serves(mpi):
    progress = mpi.progress()
    mpi.done[0] = 4
    started(progress, mpi).wait(5.0)
    (thread,) = [each for each in threading.enumerate() if each.name == "mpi"][-1:]
    del progress
    deadline_s = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not thread.is_alive()
