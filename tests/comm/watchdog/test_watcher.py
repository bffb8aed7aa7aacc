"""Watchers among themselves: their ranks are processes that only sleep."""

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpipe_hpc.comm.watchdog.activity import ActivityTracker, BetweenPhases, Phase
from gpipe_hpc.comm.watchdog.helper import Helper
from gpipe_hpc.comm.watchdog.json_connection import JsonConnection
from gpipe_hpc.comm.watchdog.neighbours import neighbours, opens_connection
from gpipe_hpc.comm.watchdog.own_process import OwnProcess
from gpipe_hpc.comm.watchdog.published_status import StatusPublisher
from gpipe_hpc.comm.watchdog.watcher import Watcher

LOOPBACK = "127.0.0.1"
DOING = {"inside": True, "waits": False, "ends": False, "limit_s": 1e9}


class Rank:
    """A process that does nothing, and its watcher as a thread of the test."""

    def __init__(self, command=("sleep", "60")):
        self.process = subprocess.Popen(command)
        own, theirs = socket.socketpair()
        self.line = JsonConnection(own)
        self.heard = []
        watcher = Watcher(JsonConnection(theirs), OwnProcess(self.process.pid))
        self.thread = threading.Thread(target=watcher.run, daemon=True)
        self.thread.start()

    def listen(self):
        self.heard += self.line.receive()
        return self.heard

    def kinds(self):
        return [message["kind"] for message in self.listen()]

    def find(self, kind):
        return next((message for message in self.listen() if message["kind"] == kind), None)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.line.close()


@contextmanager
def watched(size, until, silence_s=3.0, commands=None, shown=""):
    """Yield ranks whose watchers have found each other."""
    ranks = [Rank(*(commands or {}).get(number, ())) for number in range(size)]
    try:
        for number, rank in enumerate(ranks):
            introduce(rank.line, number, size, silence_s, shown)
        connect(ranks, [rank.line for rank in ranks], until)
        until(lambda: all(in_touch(rank) for rank in ranks), 10, "all are in touch")
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def introduce(line, number, size, silence_s, shown=""):
    orders = {"rank": number, "size": size, "key": "11" * 32, "silence_s": silence_s}
    line.send({"kind": "orders", "stack_signal": None, "stack_file": "", "display": shown} | orders)
    line.send({"kind": "listen", "host": LOOPBACK})
    line.send({"kind": "doing", "count": 1, "text": f"{number}F0"} | DOING)


def connect(ranks, lines, until):
    until(lambda: all(rank.find("listening") for rank in ranks), 10, "all listen")
    ports = [rank.find("listening")["port"] for rank in ranks]
    for number, line in enumerate(lines):
        for other in neighbours(number, len(ranks)):
            if opens_connection(number, other):
                line.send({"kind": "peer", "rank": other, "host": LOOPBACK, "port": ports[other]})


def in_touch(rank):
    told = [message for message in rank.listen() if message["kind"] == "links"]
    return bool(told) and told[-1]["all"]


def test_a_killed_process_is_named_to_all_with_its_last_action(until):
    with watched(5, until) as ranks:
        ranks[2].process.kill()
        others = [rank for number, rank in enumerate(ranks) if number != 2]
        until(lambda: all(rank.find("lost") for rank in others), 5, "all have heard")
        for rank in others:
            news = rank.find("lost")
            assert (news["rank"], news["what"], news["doing"]) == (2, "died", "2F0")
        assert "was killed by SIGKILL" in others[0].find("lost")["fate"]
        until(lambda: not ranks[2].thread.is_alive(), 5, "its watcher has ended")


def test_an_end_of_the_process_is_told_with_its_code(until):
    with watched(2, until, commands={1: (("sh", "-c", "sleep 2; exit 7"),)}) as ranks:
        until(lambda: ranks[0].find("lost"), 10, "it is told")
        assert "ended with code 7 and without a report" in ranks[0].find("lost")["fate"]


@pytest.mark.parametrize(
    ("activity", "is_lost"), [(Phase("step 3"), True), (BetweenPhases("step 3"), False)]
)
def test_code_0_in_the_middle_of_a_step_is_no_good_end(until, activity, is_lost):
    """os._exit(0) in a layer counted as leaving in good order, and nobody was told."""
    display = StatusPublisher()
    ActivityTracker(600.0, None, display).note(activity)
    shown = f"/proc/self/fd/{display.descriptor}"
    commands = {1: (("sh", "-c", "sleep 2"),)}
    with watched(2, until, commands=commands, shown=shown) as ranks:
        until(lambda: not ranks[1].thread.is_alive(), 10, "its watcher has ended")
        if is_lost:
            until(lambda: ranks[0].find("lost"), 5, "it is told")
            assert "ended with code 0 and without a report" in ranks[0].find("lost")["fate"]
        else:
            assert ranks[0].find("lost") is None
    display.close()


def test_a_dead_rank_is_noticed_while_a_process_lives_that_it_has_forked(until, tmp_path):
    """The child had inherited its parent's connections, and kept them open."""
    note = tmp_path / "child"
    fork = ("sh", "-c", f"sleep 30 & echo $! > {note}; exec sleep 60")
    with watched(3, until, commands={1: (fork,)}) as ranks:
        until(lambda: note.exists() and note.read_text().strip(), 10, "it has forked")
        ranks[1].process.kill()
        until(lambda: ranks[0].find("lost") and ranks[2].find("lost"), 5, "it is told")
        assert {ranks[0].find("lost")["rank"], ranks[2].find("lost")["rank"]} == {1}
        child = int(note.read_text())
        assert Path(f"/proc/{child}").exists()
        os.kill(child, signal.SIGKILL)


def test_a_stopped_process_is_spoken_of_first_and_then_lost(until):
    with watched(3, until) as ranks:
        ranks[1].process.send_signal(signal.SIGSTOP)
        until(lambda: all(rank.find("warning") for rank in ranks), 3, "all are warned")
        for rank in ranks:
            text = rank.find("warning")["text"]
            assert "rank 1" in text and "has been stopped for 1 s" in text and "1F0" in text
        until(lambda: all(rank.find("lost") for rank in ranks), 5, "it is lost")
        for kinds in (rank.kinds() for rank in ranks):
            assert kinds.index("warning") < kinds.index("lost")
        news = ranks[1].find("lost")
        assert (news["rank"], news["what"]) == (1, "stopped")


@pytest.mark.slow
def test_a_process_that_goes_on_in_time_is_not_lost(until):
    with watched(3, until) as ranks:
        ranks[1].process.send_signal(signal.SIGSTOP)
        until(lambda: ranks[0].find("warning"), 3, "it is spoken of")
        ranks[1].process.send_signal(signal.SIGCONT)
        until(lambda: ranks[0].kinds().count("warning") == 2, 3, "it is well again")
        assert "rank 1 runs again" in ranks[0].listen()[-1]["text"]
        time.sleep(3.5)
        assert all(rank.find("lost") is None for rank in ranks)


@contextmanager
def in_processes(size, until, silence_s):
    """Yield helpers as ranks have them, all for this process; each watcher is a process."""
    helpers = [Helper() for _ in range(size)]
    ranks = [FromHelper(helper) for helper in helpers]
    try:
        for number, rank in enumerate(ranks):
            introduce(rank, number, size, silence_s)
        connect(ranks, ranks, until)
        until(lambda: all(in_touch(rank) for rank in ranks), 20, "all are in touch")
        yield ranks
    finally:
        for rank in ranks:
            os.kill(rank.pid, signal.SIGCONT)
            rank.helper.leave()
        for rank in ranks:
            rank.helper.end()


class FromHelper(Rank):
    def __init__(self, helper):
        self.helper, self.heard, self.pid = helper, [], helper.process_number

    def send(self, message):
        self.helper.send(**message)

    def listen(self):
        self.heard += self.helper.receive(0.0)
        return self.heard


def test_a_silent_watcher_is_a_silent_rank(until):
    """As when its host has lost power, or the link to it is cut: connections stay open."""
    with in_processes(4, until, 4.0) as ranks:
        os.kill(ranks[3].pid, signal.SIGSTOP)
        since_s = time.monotonic()
        until(lambda: all(rank.find("warning") for rank in ranks[:3]), 8, "all are warned")
        assert "no sign of life" in ranks[0].find("warning")["text"]
        until(lambda: all(rank.find("lost") for rank in ranks[:3]), 8, "it is lost")
        assert time.monotonic() - since_s > 3.0
        for rank in ranks[:3]:
            news = rank.find("lost")
            assert (news["rank"], news["what"], news["doing"]) == (3, "silent", "3F0")
        os.kill(ranks[3].pid, signal.SIGCONT)
        until(lambda: ranks[3].find("lost"), 5, "it learns what the others think of it")
        assert ranks[3].find("lost")["rank"] == 3


@pytest.mark.slow
def test_ranks_that_are_suspended_together_take_nobody_for_lost(until):
    """As a scheduler does that gives the machine to another job for a while."""
    with in_processes(3, until, 3.0) as ranks:
        for rank in ranks:
            os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(5.0)
        for rank in ranks:
            os.kill(rank.pid, signal.SIGCONT)
        time.sleep(2.5)
        assert all(rank.find("lost") is None for rank in ranks)


@pytest.mark.slow
def test_a_rank_that_leaves_is_not_missed(until):
    with watched(3, until) as ranks:
        ranks[0].line.send({"kind": "doing", "count": 2, "text": "step 4"} | DOING)
        ranks[0].line.send({"kind": "left"})
        until(lambda: not ranks[0].thread.is_alive(), 5, "its watcher has ended")
        ranks[0].process.kill()
        time.sleep(4.0)
        assert ranks[1].find("lost") is None and ranks[1].find("warning") is None
        ranks[1].line.send({"kind": "call"})
        until(lambda: ranks[1].find("fact"), 3, "whoever asks is told")
        assert "rank 0" in ranks[1].find("fact")["text"]
        assert "has left the run; its last action: step 4" in ranks[1].find("fact")["text"]


def test_a_report_reaches_all_also_who_comes_later(until):
    with watched(4, until) as ranks:
        ranks[1].line.send(
            {"kind": "failure", "words": "rank 1: what happened", "is_mistake": True}
        )
        until(lambda: all(rank.find("failure") for rank in ranks), 5, "all have heard it")
        heard = [rank.find("failure") for rank in ranks]
        told = {(each["words"], each["is_mistake"]) for each in heard}
        assert told == {("rank 1: what happened", True)}
        ranks[1].process.kill()
        time.sleep(1.0)
        assert all(rank.find("lost") is None for rank in ranks), "its end is no second failure"


def stuck(rank, number, text, waits, limit_s=1.0):
    state = DOING | {"waits": waits, "limit_s": limit_s}
    rank.line.send({"kind": "doing", "count": 7, "text": text} | state)


@pytest.mark.parametrize("culprit_is_inside", [True, False])
def test_who_holds_the_others_up_is_named_with_its_stack(until, culprit_is_inside):
    """Not those that wait for it, and not who is slow while nobody waits."""
    with watched(3, until, silence_s=60.0) as ranks:
        stuck(ranks[0], 0, "0B1", waits=True)
        stuck(ranks[2], 2, "2F1", waits=True)
        inside = {"inside": culprit_is_inside, "limit_s": 1.0 if culprit_is_inside else 1e9}
        ranks[1].line.send({"kind": "doing", "count": 7, "text": "1F1"} | DOING | inside)
        until(lambda: ranks[1].find("stack"), 10, "it is asked for its stack")
        ranks[1].line.send({"kind": "stack", "text": "in forward"})
        until(lambda: all(rank.find("stuck") for rank in ranks), 5, "all have heard it")
        news = ranks[2].find("stuck")
        assert news["rank"] == 1 and "1F1" in news["text"] and news["stack"] == "in forward"
        assert all("stack" not in ranks[number].kinds() for number in (0, 2))


def test_nobody_is_named_while_nobody_waits(until):
    """A notebook in which the caller thinks between two steps."""
    with watched(2, until, silence_s=60.0) as ranks:
        for rank in ranks:
            idle = DOING | {"inside": False, "limit_s": 0.5}
            rank.line.send({"kind": "doing", "count": 7, "text": "the caller's own"} | idle)
        time.sleep(3.0)
        assert all("stack" not in rank.kinds() and "stuck" not in rank.kinds() for rank in ranks)


def test_a_rank_that_does_not_end_after_a_failure_is_ended(until, monkeypatch):
    monkeypatch.setattr("gpipe_hpc.comm.watchdog.watcher._KILL_S", 1.0)
    with watched(2, until) as ranks:
        for rank in ranks:
            rank.line.send({"kind": "doing", "count": 8, "text": "F"} | DOING | {"ends": True})
        ranks[1].process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        ranks[0].line.send({"kind": "failure", "words": "rank 0: something", "is_mistake": False})
        assert ranks[0].process.wait(5) == -signal.SIGKILL
        # One that is stopped too: torchrun waited 30 s for it, and its lock stayed.
        assert ranks[1].process.wait(5) == -signal.SIGKILL


def test_a_process_that_may_go_on_after_a_failure_is_left_alone(until, monkeypatch):
    monkeypatch.setattr("gpipe_hpc.comm.watchdog.watcher._KILL_S", 0.5)
    with watched(2, until) as ranks:
        ranks[0].line.send({"kind": "failure", "words": "rank 0: something", "is_mistake": False})
        time.sleep(2.0)
        assert ranks[1].process.poll() is None


def test_without_a_process_of_its_own_a_watcher_is_a_thread(monkeypatch, caplog):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    helper = Helper()
    assert "using a thread instead" in caplog.text
    helper.send(kind="listen", host=LOOPBACK)
    assert helper.receive(5.0)[0]["port"] > 0
    helper.leave()
    helper.end()


def test_a_watcher_takes_no_torch_and_few_files():
    helper = Helper()
    try:
        helper.send(kind="listen", host=LOOPBACK)
        assert helper.receive(20.0)
        pid = helper.process_number
        with open(f"/proc/{pid}/maps") as maps:
            assert "torch" not in maps.read()
        assert len(os.listdir(f"/proc/{pid}/fd")) <= 8
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        helper.send(kind="listen", host=LOOPBACK)
        assert helper.receive(5.0), "signals for the job's processes are not for it"
    finally:
        helper.leave()
        helper.end()
