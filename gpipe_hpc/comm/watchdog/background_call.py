"""A function call on a background thread, and detection of a thread that makes no progress."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

_NUM_FRAMES: Final = 4
_LEAST_SHARE: Final = 1e-3
"""Share of a CPU; a thread that only polls for an event uses less."""


class BackgroundCall(Generic[T]):
    """A function call on a daemon thread, which does not keep the process alive."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._over = call, threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        name = f"{threading.current_thread().name} at work"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def is_over(self) -> bool:
        """Return whether the call has ended; raise its exception if it has failed."""
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def wait(self, timeout_s: float) -> None:
        """Block until the call has ended, at most `timeout_s` seconds."""
        self._over.wait(timeout_s)

    def result(self) -> T:
        """Return the result; the call must have ended."""
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:
            self._error = error
        self._over.set()


class ThreadProgress:
    """Measures, from another thread, whether a thread makes progress."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._alive_s, self._seen = time.monotonic(), self._effort()

    def idle_s(self) -> float:
        """Return the seconds without progress of the thread, measured between calls of this method.

        Progress means that the thread or a child process reads, writes or computes. A thread that
        waits for an unresponsive file server does not. 0 if the system does not provide the
        numbers.
        """
        now_s, effort = time.monotonic(), self._effort()
        if (
            effort is None
            or self._seen is None
            or effort.exceeds(self._seen, now_s - self._alive_s)
        ):
            self._alive_s, self._seen = now_s, effort
        return now_s - self._alive_s

    def stack(self) -> str:
        """Return the thread's innermost stack frames."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]) if frame else "(it has ended)"

    def _effort(self) -> "_ResourceUse | None":
        """Return the work done so far by the thread and by child processes; None if unknown."""
        try:
            own = _ResourceUse.of(Path(f"/proc/self/task/{self._thread.native_id}"))
        except (OSError, ValueError, LookupError):
            return None
        parts = [own]
        for child in _children():
            with contextlib.suppress(OSError, ValueError, LookupError):  # it may have ended
                parts.append(_ResourceUse.of(child))
        return _ResourceUse(sum(p.computed_s for p in parts), sum(p.num_moved for p in parts))


class _ResourceUse(NamedTuple):
    """CPU seconds used and bytes read and written by a thread or process so far."""

    computed_s: float
    num_moved: int

    @classmethod
    def of(cls, place: Path) -> "_ResourceUse":
        """Return the effort of a thread or process, given its folder in /proc."""
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        counts = dict(line.split(": ") for line in (place / "io").read_text().splitlines())
        return cls(ticks / os.sysconf("SC_CLK_TCK"), int(counts["rchar"]) + int(counts["wchar"]))

    def exceeds(self, before: "_ResourceUse", passed_s: float) -> bool:
        """Return whether more was done since `before`, `passed_s` ago, than a waiting thread does.

        True also if the sum decreased, because a process has ended.
        """
        if self.num_moved != before.num_moved or self.computed_s < before.computed_s:
            return True
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        return self.computed_s - before.computed_s > max(tick_s, _LEAST_SHARE * passed_s)


def _children() -> Iterator[Path]:
    """Yield the folders in /proc of this process's children in the same session.

    The rank's watchdog process has a session of its own and is always busy.
    """
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                if (int(fields[1]), int(fields[3])) == (os.getpid(), os.getsid(0)):
                    yield place
