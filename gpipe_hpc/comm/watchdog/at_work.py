"""A call on a thread of its own, and whether a thread still does something."""

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
"""Of a processor; who waits and only looks now and then whether something has come uses less."""


class Work(Generic[T]):
    """A call on a thread of its own; a daemon, so that nobody waits for it who has to leave."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._over = call, threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        name = f"{threading.current_thread().name} at work"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def is_over(self) -> bool:
        """Say whether it has returned; raises what it raised."""
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def wait(self, timeout_s: float) -> None:
        """Return when it is over, or after so long."""
        self._over.wait(timeout_s)

    def result(self) -> T:
        """Return what it gave, once it is over."""
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:
            self._error = error
        self._over.set()


class Watched:
    """What a thread does, seen from another one."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self._alive_s, self._seen = time.monotonic(), self._effort()

    def idle_s(self) -> float:
        """Return since when it has done nothing, as far as the calls to this function saw.

        It works if it, or a process of its, reads, writes or computes; one that waits for a file
        server that does not answer does none of it. 0 where the system does not tell.
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
        """Return the calls that it is in, the innermost last."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]) if frame else "(it has ended)"

    def _effort(self) -> "_Effort | None":
        """Return what the thread and the processes of this one have done; None if not known."""
        try:
            own = _Effort.of(Path(f"/proc/self/task/{self._thread.native_id}"))
        except (OSError, ValueError, LookupError):
            return None
        parts = [own]
        for child in _children():
            with contextlib.suppress(OSError, ValueError, LookupError):  # it has ended
                parts.append(_Effort.of(child))
        return _Effort(sum(p.computed_s for p in parts), sum(p.num_moved for p in parts))


class _Effort(NamedTuple):
    """What a thread or process has done so far: seconds computed, bytes read and written."""

    computed_s: float
    num_moved: int

    @classmethod
    def of(cls, place: Path) -> "_Effort":
        """Return that of a thread or process, by its folder in /proc."""
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        counts = dict(line.split(": ") for line in (place / "io").read_text().splitlines())
        return cls(ticks / os.sysconf("SC_CLK_TCK"), int(counts["rchar"]) + int(counts["wchar"]))

    def exceeds(self, before: "_Effort", passed_s: float) -> bool:
        """Say whether more was done since then than somebody does who waits.

        Less counts too: then a process has ended.
        """
        if self.num_moved != before.num_moved or self.computed_s < before.computed_s:
            return True
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        return self.computed_s - before.computed_s > max(tick_s, _LEAST_SHARE * passed_s)


def _children() -> Iterator[Path]:
    """Yield the folders in /proc of this process's children.

    Not of those in sessions of their own: the rank's watcher is one, and works all the time.
    """
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                if (int(fields[1]), int(fields[3])) == (os.getpid(), os.getsid(0)):
                    yield place
