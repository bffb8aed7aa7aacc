"""Failure board: propagates the failure or silence of one rank to all others and ends them.

Reports travel between watcher processes (`gpipe_hpc.comm.watchdog`), even if ranks hang. The
rendezvous store decides which of several failures was the first.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

from torch.distributed.distributed_c10d import Store

from gpipe_hpc.comm.net.sealed_store import cloned
from gpipe_hpc.comm.watchdog.activity import ActivityTracker
from gpipe_hpc.comm.watchdog.discovery import WatcherDiscovery
from gpipe_hpc.comm.watchdog.helper import Helper
from gpipe_hpc.comm.watchdog.json_connection import Message
from gpipe_hpc.comm.watchdog.published_status import StatusPublisher
from gpipe_hpc.comm.watchdog.report import FailureReport
from gpipe_hpc.comm.watchdog.settings import WatchdogConfig
from gpipe_hpc.comm.watchdog.stacks import StackSignal, all_stacks

log = logging.getLogger("gpipe_hpc.watch")

BEAT_S = 1.0
REPORT_GRACE_S = 2.5
ANSWER_S = 3.0
FACTS_S = 3.5  # time for ranks to answer which one blocks them
SPREAD_S = 0.5  # time for a report to reach the others before this process may exit
SETTLE_S = 0.5  # time until all lost ranks of a host, or a rank's own report, are known
BREAK_S = 1.0  # time for the main thread to notice a failure by itself
END_S = 7.0  # time for the main thread to end after a failure
FAILED_EXIT_CODE = 1
MAX_LISTED = 8
_REMEDIES: Final = {
    "died": "look at its log; SIGKILL often means that its host ran out of memory",
    "stopped": "resume it sooner, or raise comm.silence_s",
    "silent": "its host is down, its link is cut, or all its processes are stopped",
    "helper": (
        "the rank was killed too, or is in a call that holds Python's global interpreter lock: "
        "look at its log; SIGKILL often means that its host ran out of memory"
    ),
}

T = TypeVar("T")


_THREAD_END_S: Final = 5.0  # time to wait for the thread when the process ends


class Board(Protocol):
    """State of the failure of a run, as known to one rank."""

    @property
    def has_peer_failure(self) -> bool:
        """Return whether another rank has failed and this rank's main thread does not know yet."""

    def publish(self, report: FailureReport) -> FailureReport:
        """Make `report` the run's failure if there is none yet; return the run's failure."""

    def await_spreading(self) -> None:
        """Wait briefly, before this process exits, so that other ranks can pass the report on."""

    def explain(self, symptom: str) -> FailureReport:
        """Return the run's failure; if none is reported, find out which rank blocks the others."""

    def stop(self) -> None:
        """Stop monitoring."""

    def await_end(self) -> None:
        """Wait, for a limited time, until monitoring has ended after `stop`."""

    def forget(self) -> None:
        """In a forked child process, close the parent's resources without affecting the parent."""


class SoloBoard:
    """The board of a world of one rank."""

    has_peer_failure: Final = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._report: FailureReport | None = None

    def publish(self, report: FailureReport) -> FailureReport:
        """Store the report if it is the first one; return the first one."""
        self._report = self._report or report
        return self._report

    def await_spreading(self) -> None:
        """Do nothing: there are no other ranks."""

    def explain(self, symptom: str) -> FailureReport:
        """Return the first report, or a report of `symptom` if there is none."""
        return self.publish(FailureReport(f"rank {self._rank}: {symptom}"))

    def stop(self) -> None:
        """Do nothing: nothing is monitored."""

    def await_end(self) -> None:
        """Do nothing: nothing is monitored."""

    def forget(self) -> None:
        """Do nothing: no resources are open."""


class FailureBoard:
    """The first failure of a run, exchanged with the other ranks by a background thread.

    Args:
        store: rendezvous store.
        rank: this rank.
        size: number of ranks.
        pulse: activity of this rank.
        display: shared memory in which the activity is published.
        on_report: called on the background thread if another rank has failed and the main thread
            has not noticed within a short time.
        key: key with which watchers authenticate each other.
        watchfulness: time limits.
        address: address of this host on which the watcher listens for other hosts; None to choose
            it by route.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        pulse: ActivityTracker,
        display: StatusPublisher,
        on_report: Callable[[], None],
        *,
        key: bytes,
        watchfulness: WatchdogConfig,
        address: str | None,
    ) -> None:
        self._store, self._address = store, address
        self._rank, self._size = rank, size
        self._pulse, self._display, self._on_report = pulse, display, on_report
        self._key, self._silence_s = key, watchfulness.silence_s
        self._ends_process = watchfulness.ends_process
        self._changed = threading.Condition(threading.RLock())
        self._report: FailureReport | None = None
        self._failed_s = self._lost_s = float("inf")
        self._is_told = False  # whether the main thread knows of the failure
        self._is_broken = False  # whether pending waits of this process have been ended
        self._lost: dict[int, Message] = {}
        self._facts: dict[int, tuple[float, str]] = {}
        self._stuck: dict[int, str] = {}  # stacks logged last, by rank
        self._around = ""
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._stacks = StackSignal()
        self._helper = Helper()
        # A separate connection, so that it never waits for the main thread.
        self._watched = cloned(store)
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    @property
    def has_peer_failure(self) -> bool:
        """Return whether the run has failed and this rank's main thread does not know yet."""
        return self._report is not None and not self._is_told

    def publish(self, report: FailureReport) -> FailureReport:
        """Make `report` the run's failure if there is none yet; return the run's failure."""
        with self._changed:
            standing = self._report
        if standing is None:
            with contextlib.suppress(RuntimeError, TimeoutError):
                report = _with_time_limit(ANSWER_S, lambda: self._agree(report))
            standing = self._record(report)
            self._helper.send(kind="failure", **standing._asdict())
        self._note_told()
        return standing

    def await_spreading(self) -> None:
        """Wait briefly, before this process exits, so that other ranks can pass the report on."""
        time.sleep(SPREAD_S)

    def explain(self, symptom: str) -> FailureReport:
        """Return the run's failure; if none is reported, find out which rank blocks the others."""
        report = self._await_report(REPORT_GRACE_S) or self._report_in_store()
        if report is None:
            self._helper.send(kind="call")
            report = self._await_report(FACTS_S)
        if report is None:
            symptom = f"rank {self._rank}: {symptom}; {self._finding()}"
            report = self.publish(FailureReport(with_host(symptom, self._rank)))
        else:
            self._record(report)
            self._note_told()
        return report

    def stop(self) -> None:
        """Stop the background thread and the watcher process."""
        if not self._stop.is_set():
            self._stop.set()
            self._helper.leave()

    def await_end(self) -> None:
        """Wait, for a limited time, until the background thread has ended.

        A thread that still calls torch's store during interpreter shutdown aborts the process.
        """
        if self._stop.is_set() and threading.current_thread() is not self._thread:
            self._thread.join(_THREAD_END_S)

    def forget(self) -> None:
        """In a forked child process, close the parent's resources without affecting the parent."""
        self._helper.forget()
        self._display.close()

    def _agree(self, report: FailureReport) -> FailureReport:
        self._store.compare_set("failure", "", report.written())
        return FailureReport.read(self._store.get("failure").decode())

    def _report_in_store(self) -> FailureReport | None:
        """Return the run's failure report in the store, or None; works without a watcher."""
        try:
            found = _with_time_limit(ANSWER_S, lambda: _read(self._store, "failure"))
        except (RuntimeError, TimeoutError):
            return None
        return None if found is None else FailureReport.read(found)

    def _record(self, report: FailureReport) -> FailureReport:
        """Record `report` as the run's failure if none is recorded; return the recorded one."""
        with self._changed:
            if self._report is None:
                self._report, self._failed_s = report, time.monotonic()
            self._changed.notify_all()
            return self._report

    def _note_told(self) -> None:
        self._is_told = True
        self._say_doing()

    def _await_report(self, limit_s: float) -> FailureReport | None:
        with self._changed:
            self._changed.wait_for(lambda: self._report is not None, limit_s)
            return self._report

    def _finding(self) -> str:
        """Return a text with what other ranks have answered about the rank that blocks this one."""
        with self._changed:
            recent_s = time.monotonic() - FACTS_S - REPORT_GRACE_S
            facts = [
                text for last_message_s, text in self._facts.values() if last_message_s > recent_s
            ]
            around = self._around
        if facts:
            return "; ".join(facts[:MAX_LISTED])
        if not around:
            return "no other rank has responded"
        return f"all responding ranks are alive and wait for other ranks: {around}"

    # Methods of the background thread.

    def _watch(self) -> None:
        try:
            introduction: WatcherDiscovery | None = self._introduce()
            next_beat_s = 0.0
            while not self._is_over():
                now_s = time.monotonic()
                if now_s >= next_beat_s:
                    self._say_doing()
                    next_beat_s = now_s + BEAT_S
                if introduction is not None and now_s >= introduction.due_s:
                    introduction = self._ask(introduction)
                due_s = introduction.due_s if introduction is not None else next_beat_s
                limit_s = min(next_beat_s, due_s, self._next_s()) - time.monotonic()
                for message in self._helper.receive(max(limit_s, 0.0)):
                    self._hear(message, introduction)
                self._act()
        finally:
            self._helper.end()
            self._display.close()

    def _is_over(self) -> bool:
        """Return whether the watcher process has ended for good; restart it if it was lost.

        Without a watcher, the neighbours would consider this rank lost, and a hang would go
        unnoticed.
        """
        why = self._helper.why_gone()
        if why is None:
            return False
        if self._stop.is_set() and self._helper.has_ended_well:
            return True
        before = self._helper.process_number
        if not self._helper.replace():
            log.warning(
                "rank %d: its watcher process %s; other ranks will consider this rank lost",
                *(self._rank, why),
            )
            return True
        number = self._helper.process_number
        log.warning(
            "rank %d on %s: its helper process %d, which watches other ranks, %s; %s replaces "
            "it, and the run continues",
            *(self._rank, socket.gethostname(), before, why),
            f"process {number}" if number != os.getpid() else "a thread of the rank",
        )
        self._say_doing()
        if self._report is not None:
            self._helper.send(kind="failure", **self._report._asdict())
        if self._stop.is_set():
            self._helper.leave()
        return False

    def _introduce(self) -> WatcherDiscovery:
        """Start connecting this rank's watcher with the watchers of neighbouring ranks."""
        self._helper.send(
            kind="orders",
            rank=self._rank,
            size=self._size,
            key=self._key.hex(),
            silence_s=self._silence_s,
            stack_signal=self._stacks.number,
            stack_file=f"/proc/{os.getpid()}/fd/{self._stacks.descriptor}",
            display=f"/proc/{os.getpid()}/fd/{self._display.descriptor}",
        )
        return WatcherDiscovery(
            self._watched[0], self._helper, self._rank, self._size, self._address
        )

    def _ask(self, introduction: WatcherDiscovery) -> WatcherDiscovery | None:
        try:
            introduction.advance()
        except RuntimeError:
            return None
        return introduction

    def _say_doing(self) -> None:
        pulse = self._pulse
        inside = pulse.is_inside
        self._helper.send(
            kind="doing",
            count=pulse.count,
            text=str(pulse),
            inside=inside,
            waits=pulse.waits,
            limit_s=pulse.limit_s,
            ends=self._ends_process or (inside and not self._is_told),
        )

    def _hear(self, message: Message, introduction: WatcherDiscovery | None) -> None:
        match message["kind"]:
            case "listening" if introduction is not None:
                if message.get("error"):
                    log.warning("rank %d: its watcher cannot listen: %s", self._rank, message)
                with contextlib.suppress(RuntimeError):
                    introduction.publish(message)
            case "failure":
                why = (message.get(name) is True for name in ("is_mistake", "is_stop"))
                self._record(FailureReport(str(message["words"]), *why))
            case "lost":
                self._lost[message["rank"]] = message
                self._lost_s = min(self._lost_s, time.monotonic())
            case "warning":
                log.warning("%s", message["text"])
            case "fact":
                self._note_fact(message["rank"], message["text"])
            case "stuck":
                self._note_fact(message["rank"], message["text"])
                self._say_stuck(message)
            case "around":
                self._around = message["text"]
            case "stack":
                self._helper.send(kind="stack", text=all_stacks(self._main))

    def _say_stuck(self, news: Message) -> None:
        if self._stuck.get(news["rank"]) == news["stack"]:
            log.warning("%s; its stacks have not changed", news["text"])
            return
        self._stuck[news["rank"]] = news["stack"]
        log.warning("%s; its stacks:\n%s", news["text"], news["stack"])

    def _note_fact(self, rank: int, text: str) -> None:
        with self._changed:
            self._facts[rank] = (time.monotonic(), text)

    def _next_s(self) -> float:
        """Return the time at which `_act` next has something to do."""
        return min(
            self._lost_s + SETTLE_S if self._report is None else float("inf"),
            float("inf") if self._is_broken else self._failed_s + BREAK_S,
            self._failed_s + END_S,
        )

    def _act(self) -> None:
        """Report lost ranks; after a failure, end this rank's waits and finally its process."""
        now_s = time.monotonic()
        if self._report is None and now_s >= self._lost_s + SETTLE_S:
            report = FailureReport(_describe_lost(list(self._lost.values())[:MAX_LISTED]))
            log.error("%s", self._record(report).words)
        if self._stop.is_set():
            return
        if not self._is_broken and now_s >= self._failed_s + BREAK_S:
            self._is_broken = True
            self._on_report()
        if now_s >= self._failed_s + END_S:
            self._failed_s = float("inf")
            if self._ends_process or (self._pulse.is_inside and not self._is_told):
                self._end_process()

    def _end_process(self) -> None:
        """End the process, because its main thread is stuck."""
        assert self._report is not None, "a failure stands"
        text = (
            f"rank {self._rank}: did not end within {END_S:g} s of the run's failure and is stuck "
            f"in {self._pulse}; the process ends now. The failure: {self._report.words}"
        )
        stacks = all_stacks(self._main)
        # The stuck thread may hold the locks of the logging module.
        with contextlib.suppress(TimeoutError, RuntimeError):
            _with_time_limit(1.0, lambda: log.critical("%s\n%s", text, stacks))
        with contextlib.suppress(OSError):
            os.write(2, f"gpipe_hpc: {text}\n".encode())
        os._exit(os.EX_TEMPFAIL if self._report.is_stop else FAILED_EXIT_CODE)


def _describe_lost(lost: Sequence[Message]) -> str:
    """Return a message about lost ranks; each remedy follows the last rank to which it applies."""
    last = {news["what"]: news for news in lost}
    return "; ".join(_describe_one(news, tells_remedy=last[news["what"]] is news) for news in lost)


def _describe_one(news: Message, *, tells_remedy: bool) -> str:
    name = f"rank {news['rank']}" + (f" on {news['host']}" if news["host"] else "")
    links = {"died": " died: it", "helper": ":"}
    return (
        f"{name}{links.get(news['what'], '')} {news['fate']}; its last action: {news['doing']}"
        + (f"; {news['waiting']}{_REMEDIES[news['what']]}" if tells_remedy else "")
    )


def with_host(report: str, rank: int) -> str:
    """Insert this host's name after the rank at the start of a report: ``rank 3 on node7: ...``.

    A report that does not begin with this rank is returned unchanged.
    """
    return re.sub(rf"^rank {rank}(?=[,:])", f"rank {rank} on {socket.gethostname()}", report)


def _read(store: Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _with_time_limit(limit_s: float, question: Callable[[], T]) -> T:
    """Return the result of `question`, a query of the store; TimeoutError if it takes too long."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(limit_s)


def lost(error: RuntimeError, what: str) -> ConnectionError | TimeoutError:
    """Convert torch's error about a failed wait for `what` to ConnectionError or TimeoutError.

    The lines about torch's source code are removed from the message.
    """
    text = re.sub(r"^\[\S+\] ", "", str(error)).partition(" This is typically")[0]
    if re.search("timed? ?out", text, re.IGNORECASE):
        return TimeoutError(f"timed out waiting for {what}: {text}")
    return ConnectionError(f"lost {what}: {text}")
