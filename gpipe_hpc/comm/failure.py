"""How one rank's failure reaches all others, and how a silent rank is named.

The side channel is the store that brought the ranks together: it works while collectives and
point-to-point messages hang. Each rank beats once a second, telling what it does.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

BEAT_S = 1.0
POLL_S = 0.25
REPORT_GRACE_S = 2.5
ACK_GRACE_S = 3.0
ANSWER_S = 3.0
MAX_LISTED = 8

T = TypeVar("T")


class FailureBoard:
    """The first failure of a run, shared over a store; watched by a thread on every rank.

    `on_report` is called on the watching thread when another rank has failed, after the main
    thread had a moment to find out by itself.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        activity: Callable[[], str],
        on_report: Callable[[], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._activity = activity
        self._on_report = on_report
        self._report: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._watched = _clone(store)
        self._thread.start()

    def publish(self, report: str) -> str:
        """Make `report` the run's failure unless there is one; return the one that stands."""
        self._report = report
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._report = _within(ANSWER_S, lambda: self._agree(report))
        return self._report

    def _agree(self, report: str) -> str:
        self._store.compare_set("failure", "", report)
        return self._store.get("failure").decode()

    def await_acknowledgement(self) -> None:
        """Give the other ranks a moment to read the report before this process may exit."""
        keys = [f"seen/{rank}" for rank in range(self._size) if rank != self._rank]
        with contextlib.suppress(RuntimeError, TimeoutError):
            _within(ANSWER_S + ACK_GRACE_S, lambda: self._await(keys, ACK_GRACE_S))

    def explain(self, symptom: str) -> str:
        """Return the run's failure; if nobody reported one, find out who fell silent."""
        holder = "rank 0 (or torchrun's agent), which holds it"
        try:
            report = self._report or _within(ANSWER_S + REPORT_GRACE_S, self._hear)
            if report is not None:
                return report
            finding = _within(ANSWER_S + 2.5 * BEAT_S, self._who_is_silent)
        except TimeoutError:
            return f"rank {self._rank}: {symptom}; the store does not answer: {holder}, hangs"
        except RuntimeError:
            return f"rank {self._rank}: {symptom}; the store is gone: {holder}, has died"
        return self.publish(f"rank {self._rank}: {symptom}; {finding}")

    def stop(self) -> None:
        """End the watching thread."""
        self._stop.set()

    def _hear(self) -> str | None:
        """Wait a moment for the report of whoever failed."""
        came = self._await(["failure"], REPORT_GRACE_S)
        return self._store.get("failure").decode() if came else None

    def _await(self, keys: list[str], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S / 5)
        return True

    def _who_is_silent(self) -> str:
        before = self._beats()
        time.sleep(2.5 * BEAT_S)
        after = self._beats()
        silent = [r for r in range(self._size) if r != self._rank and before[r] == after[r]]
        if silent:
            last = "; ".join(f"rank {r} (last: {_doing(after[r])})" for r in silent[:MAX_LISTED])
            return f"no sign of life from {last}: dead, stopped or cut off"
        doing = [f"rank {r}: {_doing(after[r])}" for r in range(self._size)][:MAX_LISTED]
        return "all ranks are alive: " + ", ".join(doing)

    def _beats(self) -> list[str]:
        keys = [f"beat/{rank}" for rank in range(self._size)]
        return [self._store.get(k).decode() if self._store.check([k]) else "0 " for k in keys]

    def _watch(self) -> None:
        count = 0
        next_beat = 0.0
        pause_s = 0.0  # the first beat at once: a rank may die before the next
        while not self._stop.wait(pause_s):
            pause_s = POLL_S
            try:
                if time.monotonic() >= next_beat:
                    count += 1
                    self._watched.set(f"beat/{self._rank}", f"{count} {self._activity()}")
                    next_beat = time.monotonic() + BEAT_S
                if self._watched.check(["failure"]):
                    self._report = self._watched.get("failure").decode()
                    self._watched.set(f"seen/{self._rank}", "1")
                    break
            except RuntimeError:
                return  # the store is gone: a failing wait will say so
        else:
            return
        if not self._stop.wait(REPORT_GRACE_S / 2):
            self._on_report()


def _within(limit_s: float, question: Callable[[], T]) -> T:
    """Return the answer; TimeoutError if it takes too long: a stopped store never answers."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(limit_s)


def lost(error: RuntimeError, what: str) -> ConnectionError | TimeoutError:
    """Return what torch's error about a wait means, without the noise of its source lines."""
    text = re.sub(r"^\[\S+\] ", "", str(error)).partition(" This is typically")[0]
    if re.search("timed? ?out", text, re.IGNORECASE):
        return TimeoutError(f"waited in vain for {what}: {text}")
    return ConnectionError(f"lost {what}: {text}")


def _doing(beat: str) -> str:
    return beat.partition(" ")[2] or "not started"


def _clone(store: Store) -> Store:
    """Return a connection of the watcher's own, so that it never waits behind the main thread."""
    duplicate: Any = getattr(store, "clone", None)
    try:
        own: Store = store if duplicate is None else duplicate()
    except RuntimeError:  # a file store, say
        return store
    return own
