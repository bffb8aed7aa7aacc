"""One run owns its folder; the lock of a dead one goes to one of those that want it."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from gpipe_hpc.errors import RunFolderError
from gpipe_hpc.trainer.run import lock as run_lock
from gpipe_hpc.trainer.run.lock import LOCK_FILE, LockOwner, RunLock


@pytest.fixture
def dead_pid():
    """Return the number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def fast(monkeypatch):
    """Let beats and waits be short."""
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "STALE_S", 1.0)
    monkeypatch.setattr(run_lock, "WAIT_S", 3.0)
    monkeypatch.setattr(run_lock, "_POLL_S", 0.02)


def put(folder, name=LOCK_FILE, age_s=0.0, **changes):
    """Leave a lock of somebody else."""
    owner = run_lock.myself()._replace(token="other", host="elsewhere", **changes)
    (folder / name).write_text(json.dumps(owner._asdict()))
    then = time.time() - age_s
    os.utime(folder / name, (then, then))


def test_who_holds_a_lock_is_named(tmp_path):
    with RunLock.acquire(tmp_path) as held:
        text = (tmp_path / LOCK_FILE).read_text()
        with pytest.raises(RunFolderError, match=rf"process {os.getpid()} on .*another run\.dir"):
            RunLock.acquire(tmp_path)
        assert (tmp_path / LOCK_FILE).read_text() == text
        held.check(looks=True)
    assert list(tmp_path.iterdir()) == []
    RunLock.acquire(tmp_path).release()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, dead_pid):
    put(tmp_path, pid=dead_pid)
    with RunLock.acquire(tmp_path) as held:
        assert LockOwner(**json.loads((tmp_path / LOCK_FILE).read_text())) == held.owner
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_got_a_dead_ones_number_is_not_taken_for_it(tmp_path):
    put(tmp_path, pid=os.getpid(), pid_started=run_lock.myself().pid_started - 1)
    with RunLock.acquire(tmp_path) as held:
        assert LockOwner(**json.loads((tmp_path / LOCK_FILE).read_text())) == held.owner


def test_a_process_that_is_hidden_is_alive(tmp_path, monkeypatch):
    """Where /proc shows no other user's processes."""

    def refuse(pid, number):
        raise PermissionError

    monkeypatch.setattr(run_lock, "started", lambda pid: None)
    put(tmp_path, pid=1, pid_started=7)
    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(RunFolderError, match="process 1 on"):
        RunLock.acquire(tmp_path)


def test_a_lock_of_another_machine_is_judged_by_its_beats(tmp_path, fast, dead_pid):
    """Process numbers of another machine, or container, say nothing here."""
    put(tmp_path, machine="another", pid=dead_pid)
    with pytest.raises(RunFolderError, match=r"elsewhere.*last heartbeat 0 s ago"):
        RunLock.acquire(tmp_path)
    put(tmp_path, machine="another", pid=dead_pid, age_s=2.0)
    RunLock.acquire(tmp_path).release()


def test_a_restart_waits_for_the_process_before_it(tmp_path, fast):
    held, order = RunLock.acquire(tmp_path), []

    def release():
        order.append("given back")
        held.release()

    threading.Timer(0.3, release).start()
    with RunLock.acquire(tmp_path, waits=True):
        order.append("taken")
    assert order == ["given back", "taken"]


def test_a_restart_does_not_wait_for_ever(tmp_path, fast):
    with RunLock.acquire(tmp_path), pytest.raises(RunFolderError, match="used by another run"):
        RunLock.acquire(tmp_path, waits=True)


def test_a_silent_machine_that_beats_again_is_alive(tmp_path, fast):
    put(tmp_path, machine="another", age_s=0.5)
    beats = threading.Timer(0.2, lambda: os.utime(tmp_path / LOCK_FILE))
    beats.start()
    with pytest.raises(RunFolderError, match="used by another run"):
        RunLock.acquire(tmp_path)
    beats.join()


def test_who_was_taken_for_dead_learns_it(tmp_path, fast):
    held = RunLock.acquire(tmp_path)
    put(tmp_path, name="other")
    os.replace(tmp_path / "other", tmp_path / LOCK_FILE)
    with pytest.raises(RunFolderError, match="taken over by process"):
        held.check(looks=True)
    held.release()
    assert (tmp_path / LOCK_FILE).exists(), "it is another's"


def test_a_lock_that_is_removed_is_missed(tmp_path, fast):
    held = RunLock.acquire(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    with pytest.raises(RunFolderError, match="removed by hand, or by a run"):
        held.check(looks=True)
    held.release()


def test_what_those_left_who_died_waiting_is_removed(tmp_path, dead_pid):
    put(tmp_path, name=f"{LOCK_FILE}.new.other", pid=dead_pid)
    put(tmp_path, name=f"{LOCK_FILE}.new.waiting")
    with RunLock.acquire(tmp_path):
        assert not (tmp_path / f"{LOCK_FILE}.new.other").exists()
        assert (tmp_path / f"{LOCK_FILE}.new.waiting").exists()


def test_an_unreadable_lock_is_judged_by_its_age(tmp_path, fast):
    (tmp_path / LOCK_FILE).write_text("{")
    with pytest.raises(RunFolderError, match="unknown host"):
        RunLock.acquire(tmp_path)
    os.utime(tmp_path / LOCK_FILE, (1, 1))
    RunLock.acquire(tmp_path).release()


def test_where_there_are_no_links_one_still_gets_it(tmp_path, monkeypatch, dead_pid):
    def refuse(*_):
        raise OSError(run_lock.errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    put(tmp_path, pid=dead_pid)
    with RunLock.acquire(tmp_path), pytest.raises(RunFolderError):
        RunLock.acquire(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("heirs", [0, 1, 2])
def test_of_many_that_take_over_at_once_one_wins(tmp_path, dead_pid, heirs):
    """`heirs`: how many died while they took over, and left their claims."""
    for _ in range(20):
        put(tmp_path, pid=dead_pid)
        last = "other"
        for number in range(heirs):
            token = f"heir{number}"
            put(tmp_path, name=f"{LOCK_FILE}.after.{last}", pid=dead_pid)
            claim = tmp_path / f"{LOCK_FILE}.after.{last}"
            claim.write_text(claim.read_text().replace('"other"', f'"{token}"'))
            last = token
        won, lost = [], []
        barrier = threading.Barrier(8)

        def try_it(won=won, lost=lost, barrier=barrier):
            barrier.wait()
            try:
                won.append(RunLock.acquire(tmp_path))
            except RunFolderError as error:
                lost.append(error)

        threads = [threading.Thread(target=try_it) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(lost)) == (1, 7)
        won[0].check(looks=True)
        won[0].release()
        assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_read_is_not_removed(tmp_path):
    """It may be another's, half written: who gave back its own took that away."""
    lock = RunLock.acquire(tmp_path)
    (tmp_path / LOCK_FILE).write_text("{")
    lock.release()
    assert (tmp_path / LOCK_FILE).exists()
