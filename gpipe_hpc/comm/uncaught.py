"""What an error that nobody catches prints in a script of several ranks: one message.

It stands, with the user's traceback, on the rank where it happened. The others say in a line why
they stop. torchrun is told the same, so that its own report ends with the cause.
"""

import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from gpipe_hpc.comm.torchrun_report import tell_torchrun
from gpipe_hpc.comm.tracebacks import leave_out_own_frames, shows_all_frames
from gpipe_hpc.errors import PeerError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Telling(Protocol):
    """A rank that can tell the others of its failure, as `ProcessWorld`."""

    rank: int

    @property
    def speaks(self) -> bool | None:
        """Say whether this rank's failure is the run's; None while it has told none."""

    def fail(self, report: str) -> None:
        """Tell every rank that this one failed."""


def watch_uncaught(world: Telling) -> None:
    """Let `sys.excepthook` tell of errors that end this process; what was there prints them."""
    sys.excepthook = _Uncaught(world, sys.excepthook)


class _Uncaught:
    def __init__(self, world: Telling, before: Hook) -> None:
        # The hook must not keep the world: it closes what it opened once nobody uses it.
        self._world, self._before = weakref.ref(world), before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        world = self._world()
        if world is None or not isinstance(error, Exception):
            self._before(kind, error, trace)
            return
        leave_out_own_frames(error)
        line = _stops(world, error)
        if line is None:
            self._before(kind, error, error.__traceback__)
            text = "".join(traceback.format_exception(error))
        else:
            text = line
            if shows_all_frames():
                self._before(kind, error, error.__traceback__)
            print(line, file=sys.stderr, flush=True)
        tell_torchrun(text, is_cause=line is None)


def _stops(world: Telling, error: Exception) -> str | None:
    """Return the line of a rank that stops for another's failure; None where it is its own."""
    if isinstance(error, PeerError):
        return f"gpipe_hpc: rank {world.rank} stops, as another failed: {_first_line(error)}"
    if world.speaks is None:
        world.fail(f"rank {world.rank}: {_place(error)}{type(error).__name__}: {error}")
    if world.speaks:
        return None
    return f"gpipe_hpc: rank {world.rank} stops too: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _place(error: Exception) -> str:
    """Return the user's innermost line, for ranks that do not see the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
