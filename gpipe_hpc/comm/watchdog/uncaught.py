"""Handling of uncaught exceptions in scripts of several ranks: each error is printed once.

The rank that failed prints the message below the user's traceback. Each other rank prints one line
with the reason why it stops, and so does each rank interrupted by Ctrl-C. torchrun receives the
same messages, so that its report ends with the cause.
"""

import _thread
import math
import os
import re
import signal
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Protocol

from gpipe_hpc.comm.watchdog.output_streams import print_line
from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error
from gpipe_hpc.comm.watchdog.tracebacks import (
    join_cause,
    shows_all_frames,
    strip_own_frames,
    users_line,
)
from gpipe_hpc.errors import GpipeError, PeerError, words_of

_MOST: Final = 160  # largest number of characters of another rank's message
_ONE_PRESS_S: Final = 0.5
_MOMENT_S: Final = 0.001
_TABLE: Final = re.compile(r" \(table: [^)]*\)")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class FailureReporter(Protocol):
    """Interface of a world that can report this rank's failure to the others, as `ProcessWorld`."""

    rank: int

    @property
    def is_first_failure(self) -> bool | None:
        """Whether this rank's failure is the one that ended the run; None if it has not failed."""

    def fail(self, report: str) -> None:
        """Report to every rank that this one failed."""


def install_start_hook(rank: int, size: int) -> None:
    """Install a `sys.excepthook` that prints each error of this package once for all ranks.

    Until the ranks are connected, only rank 0 prints in full an error that occurs on all ranks.
    """
    hook = _hook()
    hook.start(rank, size)
    if size > 1 and not isinstance(sys.unraisablehook, _Interrupts):
        _Interrupts(sys.unraisablehook).install()


def install_failure_hook(world: FailureReporter) -> None:
    """Make `sys.excepthook` also report the exception that ends this process to the other ranks."""
    _hook().watch(world)


def remove_failure_hook() -> None:
    """Restore the previous `sys.excepthook`, because new torch groups wrap the current hook."""
    if isinstance(sys.excepthook, _Uncaught):
        sys.excepthook = sys.excepthook.before


def _hook() -> "_Uncaught":
    hook = sys.excepthook
    if not isinstance(hook, _Uncaught):
        hook = _Uncaught(hook)
        sys.excepthook = hook
    return hook


class _Uncaught:
    """The exception hook; exceptions that do not concern this package go to the previous hook."""

    def __init__(self, before: Hook) -> None:
        self.before = before
        self._rank, self._size = 0, 1
        self._is_joining = False
        # Weak references: an unused world closes its connections.
        self._worlds: list[weakref.ref[FailureReporter]] = []

    def start(self, rank: int, size: int) -> None:
        self._rank, self._size, self._is_joining = rank, size, size > 1

    def watch(self, world: FailureReporter) -> None:
        self._rank, self._is_joining = world.rank, False
        self._worlds = [each for each in self._worlds if each() is not None]
        self._worlds.append(weakref.ref(world))

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(sys.unraisablehook, _Interrupts):
            sys.unraisablehook.stop()
        if isinstance(error, KeyboardInterrupt) and self._size > 1:
            self._end_interrupted(error)
            return
        if not isinstance(error, Exception):
            self.before(kind, error, trace)
            return
        strip_own_frames(error)
        line = self._line(error)
        join_cause(error)
        if line is None or shows_all_frames():
            self.before(kind, error, error.__traceback__)
        if line is None:
            message = "".join(traceback.format_exception_only(error))
            whole = "".join(traceback.format_exception(error))
            write_torchrun_error(message, is_cause=True, whole=whole)
        else:
            _print_and_report(line, f"rank {self._rank} stops because another rank failed")

    def _line(self, error: Exception) -> str | None:
        """Return the line to print on a rank that stops because of another rank's failure.

        None if the error is this rank's own and is printed in full.
        """
        if isinstance(error, PeerError) and not _is_own_report(error, self._rank):
            text = f"rank {self._rank} stops because another rank failed: {_brief(error)}"
            return f"gpipe_hpc: {text}"
        told = self._tell(f"{_place(error)}{words_of(error)}")
        is_all_ranks = self._is_joining and self._rank > 0 and isinstance(error, GpipeError)
        if False not in told and not is_all_ranks:
            return None
        text = f"{type(error).__name__}: {_brief(error)}"
        return f"gpipe_hpc: rank {self._rank} stops too: {text}"

    def _end_interrupted(self, error: KeyboardInterrupt) -> None:
        # The launcher may forward the same Ctrl-C again.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        strip_own_frames(error)
        place = _place(error).removesuffix(": ")
        line = f"rank {self._rank} was interrupted" + (f" at {place}" if place else "")
        _print_and_report(f"gpipe_hpc: {line}", line)
        # From here on another Ctrl-C ends the process at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._tell(f"{_place(error)}interrupted")

    def _tell(self, what: str) -> list[bool | None]:
        """Report the failure in each world; return for each whether it ended the run."""
        worlds = [world for each in self._worlds if (world := each()) is not None]
        for world in worlds:
            if world.is_first_failure is None:
                world.fail(f"rank {world.rank}: {what}")
        return [world.is_first_failure for world in worlds]


class _Interrupts:
    """Hook that makes each Ctrl-C raise exactly one `KeyboardInterrupt`.

    A launcher forwards a signal that the terminal already sent to its processes; both count as one.
    Python only prints a KeyboardInterrupt raised in a destructor, which would be lost: it is raised
    again a moment later. The previous hook handles all other unraisable exceptions.
    """

    def __init__(self, before: Callable[["sys.UnraisableHookArgs"], object]) -> None:
        self._before = before
        self._came_s = -math.inf
        self._is_telling = self._is_over = False

    def install(self) -> None:
        """Replace Python's default SIGINT handler; a handler set by the user stays."""
        sys.unraisablehook = self
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)

    def stop(self) -> None:
        """Stop raising lost interrupts again, because the process is ending."""
        self._is_over = True

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._before(unraisable)
            return
        self._is_telling = True
        _thread.start_new_thread(self._interrupt_again, ())
        self._is_telling = False  # last, because an exception in a hook would be lost again

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s > self._came_s + _ONE_PRESS_S:
            self._came_s = now_s
            raise KeyboardInterrupt

    def _interrupt_again(self) -> None:
        while self._is_telling:
            time.sleep(_MOMENT_S)
        time.sleep(_MOMENT_S)
        if not self._is_over:
            self._came_s = -math.inf
            # A signal also interrupts blocking calls.
            os.kill(os.getpid(), signal.SIGINT)


def _print_and_report(line: str, reported: str) -> None:
    """Print `line`; give torchrun `reported`, because another rank reports the cause."""
    print_line(line)
    write_torchrun_error(reported, is_cause=False, whole=line)


def _is_own_report(error: PeerError, rank: int) -> bool:
    """Return whether a PeerError is about this rank itself, because its own wait timed out."""
    return re.match(rf"rank {rank}\b", str(error)) is not None


def _brief(error: BaseException) -> str:
    """Return the first line of an error message, without tables, as the failed rank prints all."""
    first = _TABLE.sub("", (str(error).splitlines() or [""])[0])
    return textwrap.shorten(first, _MOST, placeholder=" ...")


def _place(error: BaseException) -> str:
    """Return a prefix with the user's innermost line, for ranks that do not see the traceback."""
    line = users_line(error)
    return f"{line}: " if line else ""
