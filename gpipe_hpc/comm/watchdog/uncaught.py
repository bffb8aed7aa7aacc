"""What an error that nobody catches prints in a script of several ranks: one message.

It stands, below the user's traceback, on the rank where it happened. The others say in a line why
they stop, and so does each rank that Ctrl-C ends. torchrun is told the same, so that its own report
ends with the cause.
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

from gpipe_hpc.comm.watchdog.saying import say
from gpipe_hpc.comm.watchdog.torchrun_report import tell_torchrun
from gpipe_hpc.comm.watchdog.tracebacks import (
    join_cause,
    leave_out_own_frames,
    shows_all_frames,
    users_line,
)
from gpipe_hpc.errors import GpipeError, PeerError, words_of

_MOST: Final = 160  # characters of what another rank has said in full
_ONE_PRESS_S: Final = 0.5
_MOMENT_S: Final = 0.001
_TABLE: Final = re.compile(r" \(table: [^)]*\)")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Telling(Protocol):
    """A rank that can tell the others of its failure, as `ProcessWorld`."""

    rank: int

    @property
    def speaks(self) -> bool | None:
        """Say whether this rank's failure is the run's; None while it has told none."""

    def fail(self, report: str) -> None:
        """Tell every rank that this one failed."""


def watch_start(rank: int, size: int) -> None:
    """Let `sys.excepthook` show one message for each error of ours.

    Until the ranks are together, a mistake of all of them is shown in full by rank 0 alone.
    """
    hook = _hook()
    hook.start(rank, size)
    if size > 1 and not isinstance(sys.unraisablehook, _Interrupts):
        _Interrupts(sys.unraisablehook).install()


def watch_uncaught(world: Telling) -> None:
    """Let `sys.excepthook` also tell the other ranks of what ends this process."""
    _hook().watch(world)


def unwatch() -> None:
    """Put back the hook that was there, as torch wraps what it finds when it forms its group."""
    if isinstance(sys.excepthook, _Uncaught):
        sys.excepthook = sys.excepthook.before


def _hook() -> "_Uncaught":
    hook = sys.excepthook
    if not isinstance(hook, _Uncaught):
        hook = _Uncaught(hook)
        sys.excepthook = hook
    return hook


class _Uncaught:
    """The hook; what was there before prints what is not ours to say."""

    def __init__(self, before: Hook) -> None:
        self.before = before
        self._rank, self._size = 0, 1
        self._is_joining = False
        # The hook must not keep a world: it closes what it opened once nobody uses it.
        self._worlds: list[weakref.ref[Telling]] = []

    def start(self, rank: int, size: int) -> None:
        self._rank, self._size, self._is_joining = rank, size, size > 1

    def watch(self, world: Telling) -> None:
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
        leave_out_own_frames(error)
        line = self._line(error)
        join_cause(error)
        if line is None or shows_all_frames():
            self.before(kind, error, error.__traceback__)
        if line is None:
            message = "".join(traceback.format_exception_only(error))
            whole = "".join(traceback.format_exception(error))
            tell_torchrun(message, is_cause=True, whole=whole)
        else:
            _say(line, f"rank {self._rank} stops, as another failed")

    def _line(self, error: Exception) -> str | None:
        """Return what a rank says that stops for another's failure.

        None where the error is its own, so that all of it is to be shown.
        """
        if isinstance(error, PeerError) and not _tells_of(error, self._rank):
            return f"gpipe_hpc: rank {self._rank} stops, as another failed: {_brief(error)}"
        told = self._tell(f"{_place(error)}{words_of(error)}")
        is_all_ranks = self._is_joining and self._rank > 0 and isinstance(error, GpipeError)
        if False not in told and not is_all_ranks:
            return None
        text = f"{type(error).__name__}: {_brief(error)}"
        return f"gpipe_hpc: rank {self._rank} stops too: {text}"

    def _end_interrupted(self, error: KeyboardInterrupt) -> None:
        # A launcher passes on what the terminal has sent to its processes too: this is one press.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        leave_out_own_frames(error)
        place = _place(error).removesuffix(": ")
        line = f"rank {self._rank} was interrupted" + (f" at {place}" if place else "")
        _say(f"gpipe_hpc: {line}", line)
        # From here on another ends the process at once, whatever it is in.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._tell(f"{_place(error)}interrupted")

    def _tell(self, what: str) -> list[bool | None]:
        """Tell the ranks of each world; return whether this rank's failure is the run's."""
        worlds = [world for each in self._worlds if (world := each()) is not None]
        for world in worlds:
            if world.speaks is None:
                world.fail(f"rank {world.rank}: {what}")
        return [world.speaks for world in worlds]


class _Interrupts:
    """Lets each Ctrl-C be one `KeyboardInterrupt`: not two, and not none.

    A launcher passes on what the terminal has sent to its processes too: that is one press. What is
    raised in a destructor cannot go on, so Python prints it and the program is not interrupted:
    here it comes once more, a moment later. What was there before prints what else is raised there.
    """

    def __init__(self, before: Callable[["sys.UnraisableHookArgs"], object]) -> None:
        self._before = before
        self._came_s = -math.inf
        self._is_telling = self._is_over = False

    def install(self) -> None:
        """Take the place of Python's own handler; a handler of the user's stays."""
        sys.unraisablehook = self
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)

    def stop(self) -> None:
        """Interrupt no more by itself, as the process ends anyway."""
        self._is_over = True

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._before(unraisable)
            return
        self._is_telling = True
        _thread.start_new_thread(self._interrupt_again, ())
        self._is_telling = False  # the last of all: what is raised in a hook is lost again

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
            # A signal, as it also wakes what waits.
            os.kill(os.getpid(), signal.SIGINT)


def _say(line: str, reported: str) -> None:
    """Print a line; torchrun, which has the cause from another rank, is told less."""
    say(line)
    tell_torchrun(reported, is_cause=False, whole=line)


def _tells_of(error: PeerError, rank: int) -> bool:
    """Say whether the report is this rank's own: it has waited in vain, and nobody has failed."""
    return re.match(rf"rank {rank}\b", str(error)) is not None


def _brief(error: BaseException) -> str:
    """Return how a message begins, without the table; all of it stands where it happened."""
    first = _TABLE.sub("", (str(error).splitlines() or [""])[0])
    return textwrap.shorten(first, _MOST, placeholder=" ...")


def _place(error: BaseException) -> str:
    """Return the user's innermost line, for ranks that do not see the traceback."""
    line = users_line(error)
    return f"{line}: " if line else ""
