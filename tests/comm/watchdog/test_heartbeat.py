"""Work that takes longer than a wait between ranks may."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.watchdog import heartbeat
from gpipe_hpc.comm.watchdog.heartbeat import run_here_with_heartbeat, run_with_heartbeat
from gpipe_hpc.errors import DataError, PeerError, StalledError


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Let ranks meet often enough for a short test."""
    monkeypatch.setattr(heartbeat, "_MEET_EVERY_S", 0.05)


def test_others_wait_for_longer_than_the_time_out():
    """Rank 0 indexed within a collective: after 600 s all ended."""

    def body(world):
        work = (lambda: time.sleep(2) or "found") if world.rank == 0 else None
        return run_with_heartbeat(world, "opening", work)

    assert run_on_threads(3, body, timeout_s=0.8) == ["found", None, None]


def test_others_wait_as_long_for_work_on_the_calling_thread():
    """Rank 0 measured layers while the others waited in one collective: it timed out."""

    def body(world):
        here = threading.get_ident()

        def work():
            time.sleep(2)
            return threading.get_ident() == here

        return run_here_with_heartbeat(world, "measuring", work if world.rank == 0 else None)

    assert run_on_threads(3, body, timeout_s=0.8) == [True, None, None]


@pytest.mark.parametrize("do", [run_with_heartbeat, run_here_with_heartbeat])
def test_each_gets_what_its_own_work_gave(do):
    def body(world):
        return do(world, "opening", lambda: time.sleep(0.1 * world.rank) or world.rank)

    assert run_on_threads(3, body) == [0, 1, 2]


@pytest.mark.parametrize("do", [run_with_heartbeat, run_here_with_heartbeat])
def test_failure_ends_all_with_its_reason(do):
    told = []

    def body(world):
        def fail():
            time.sleep(0.2)
            raise DataError("data: x is not there")

        try:
            do(world, "opening", fail if world.rank == 1 else None)
        except (DataError, PeerError) as error:
            told.append((world.rank, type(error), str(error)))
            raise

    with pytest.raises(DataError, match=r"^data: x is not there$"):
        run_on_threads(3, body)
    assert sorted(told, key=lambda each: each[0]) == [
        (0, PeerError, "rank 1: data: x is not there"),
        (1, DataError, "data: x is not there"),
        (2, PeerError, "rank 1: data: x is not there"),
    ]


def test_work_here_ends_with_the_failure_of_another_rank():
    """What another rank met while this one worked is what this one says."""
    told = []

    def body(world):
        if world.rank == 1:
            world.fail("rank 1: gone")
            raise DataError("gone")
        try:
            run_here_with_heartbeat(world, "measuring", lambda: time.sleep(0.3))
        except PeerError as error:
            told.append(str(error))
            raise

    with pytest.raises(DataError, match=r"^gone$"):
        run_on_threads(2, body)
    assert told == ["rank 1: gone"]


def test_work_here_that_does_nothing_ends_the_others():
    """A layer that waited for ever while it was measured would have held all ranks for ever."""
    told, is_heard = [], threading.Event()

    def body(world):
        try:
            work = (lambda: is_heard.wait(20)) if world.rank == 0 else None
            run_here_with_heartbeat(world, "measuring", work, idle_s=0.5)
        except PeerError as error:
            told.append(str(error))
            is_heard.set()
            raise

    with pytest.raises(StalledError, match=r"did not read, write or compute for 0\.5 s"):
        run_on_threads(2, body)
    assert (
        "rank 0: measuring: did not read, write or compute" in told[0]
        and "is_heard.wait(20)" in told[0]
    )


def test_what_a_rank_does_is_shown_anew_at_each_meeting():
    """Who watches for ranks that do nothing new must see that this one lives."""

    def body(world):
        return run_with_heartbeat(world, "opening", lambda: time.sleep(0.5) or str(world.activity))

    shown = run_on_threads(2, body)
    assert all(re.fullmatch(r"opening for \d+ s", each) for each in shown), shown


def test_work_is_done_beside_the_rank():
    names = run_on_threads(
        2, lambda world: run_with_heartbeat(world, "x", lambda: threading.current_thread().name)
    )
    assert names == ["rank0 at work", "rank1 at work"]


def test_work_that_hangs_is_named_with_where_it_is(monkeypatch, caplog):
    """A dead file server held up all for ever: each second looked like progress."""
    monkeypatch.setattr(heartbeat, "_SAY_AFTER_S", 0.1)
    is_said = threading.Event()

    def hang_on_a_disk():
        assert is_said.wait(60)

    def body(world):
        return run_with_heartbeat(world, "opening", hang_on_a_disk if world.rank == 1 else None)

    def see(record):
        is_said.set()
        return True

    caplog.handler.addFilter(see)
    run_on_threads(2, body)
    assert "rank 1: opening has been running for" in caplog.text and "hang_on_a_disk" in caplog.text
    assert "rank 0: opening" not in caplog.text


def test_work_that_does_nothing_any_more_ends_all():
    """It was named after a minute, and again after two, and never ended."""
    told = {}
    answer = threading.Event()

    def read_from_a_dead_file_server():
        answer.wait()

    def body(world):
        work = read_from_a_dead_file_server if world.rank == 1 else None
        try:
            run_with_heartbeat(world, "opening", work, idle_s=0.5)
        except (StalledError, PeerError) as error:
            told[world.rank] = type(error), str(error)
            raise

    try:
        with pytest.raises(StalledError, match=r"(?s)0.5 s; .*read_from_a_dead_file_server"):
            run_on_threads(3, body)
    finally:
        answer.set()
    assert [told[rank][0] for rank in range(3)] == [PeerError, StalledError, PeerError]
    assert "rank 1: opening" in told[0][1]


def compute(until_s):
    while time.monotonic() < until_s:
        sum(range(10_000))


def read(until_s):
    """Read a byte now and then: next to no computing."""
    with Path("/dev/zero").open("rb", buffering=0) as file:
        while time.monotonic() < until_s:
            file.read(1)
            time.sleep(0.1)


def let_a_process_compute(until_s):
    seconds = until_s - time.monotonic()
    program = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("work", [compute, read, let_a_process_compute])
def test_work_that_does_something_goes_on(work):
    """Indexing terabytes takes hours, some of it in other processes."""

    def body(world):
        end_s = time.monotonic() + 5.0
        # Two: on a busy machine a process may get no time for one second.
        return run_with_heartbeat(world, "opening", lambda: work(end_s) or "done", idle_s=2.0)

    assert run_on_threads(1, body) == ["done"]
