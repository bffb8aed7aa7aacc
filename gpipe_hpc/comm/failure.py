"""How one rank's failure reaches all others, and how a silent rank is named.

The side channel is the store that brought the ranks together: it works while collectives and
point-to-point messages hang. Each rank beats once a second, telling what it does.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

BEAT_S = 1.0
POLL_S = 0.25
REPORT_GRACE_S = 2.5
ACK_GRACE_S = 3.0
MAX_LISTED = 8


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
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("failure", "", report)
            self._report = self._store.get("failure").decode()
        return self._report or report

    def await_acknowledgement(self) -> None:
        """Give the other ranks a moment to read the report before this process may exit."""
        deadline = time.monotonic() + ACK_GRACE_S
        keys = [f"seen/{rank}" for rank in range(self._size) if rank != self._rank]
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(POLL_S / 5)

    def explain(self, symptom: str) -> str:
        """Return the run's failure; if nobody reported one, find out who fell silent."""
        deadline = time.monotonic() + REPORT_GRACE_S
        while self._report is None and time.monotonic() < deadline:
            if self._read() is not None:
                break
            time.sleep(POLL_S / 5)
        if self._report is not None:
            return self._report
        return self.publish(f"rank {self._rank}: {symptom}; {self._who_is_silent()}")

    def stop(self) -> None:
        """End the watching thread."""
        self._stop.set()

    def _read(self) -> str | None:
        with contextlib.suppress(RuntimeError):
            if self._report is None and self._store.check(["failure"]):
                self._report = self._store.get("failure").decode()
        return self._report

    def _who_is_silent(self) -> str:
        try:
            before = self._beats()
            time.sleep(2.5 * BEAT_S)
            after = self._beats()
        except RuntimeError:
            return "the store no longer answers: the process that holds it (rank 0) has died"
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
        while not self._stop.wait(POLL_S):
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
