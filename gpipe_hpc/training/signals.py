"""Requests to stop, from outside: noted when they come, obeyed at the step's edge.

A second Ctrl-C ends the process at once, and so does the first one before there are steps.

Imports no torch: a signal that comes while torch still loads must find its handler.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE_EXIT_CODE: Final = 75  # EX_TEMPFAIL of sysexits.h: try again
INTERRUPTED_EXIT_CODE: Final = 128 + signal.SIGINT  # as shells say it

_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_ONE_PRESS_S: Final = 0.5
"""A launcher passes on a Ctrl-C that the terminal has sent to its processes too: that is one."""


class StopRequest:
    """Remembers the first stop signal of this process; ends it when Ctrl-C asks for that.

    Where it ends a process at once, what others want done at last is done before, for at most
    `grace_s` seconds.
    """

    def __init__(self, grace_s: float = 5.0) -> None:
        self.signal: signal.Signals | None = None
        self._has_steps = False
        self._at_last: list[Callable[[], object]] = []
        self._grace_s = grace_s
        self._came_s = 0.0

    def listen(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Install the handlers; outside the main thread Python allows none, and none are set."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._note)

    @property
    def came(self) -> bool:
        """Say whether this process was asked to stop."""
        return self.signal is not None

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Return a block that looks between steps whether a request `came`."""
        self._has_steps = True
        try:
            yield
        finally:
            self._has_steps = False

    @contextmanager
    def doing_last(self, do: Callable[[], object]) -> Iterator[None]:
        """Return a block in which a process that ends at once does this, the last told first.

        It is done by another thread, so it must not need a lock that the main thread may hold.
        """
        self._at_last.append(do)
        try:
            yield
        finally:
            self._at_last.remove(do)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        is_interrupt = number == signal.SIGINT
        is_repeated = self.came and now_s - self._came_s > _ONE_PRESS_S
        if is_interrupt and (is_repeated or not self._has_steps):
            when = "now" if is_repeated else "before the first step, so nothing is lost"
            self._end_at_once(f"interrupted: ends {when}")
        if not self.came:
            self.signal, self._came_s = signal.Signals(number), now_s
            if is_interrupt:
                _say("stopping after this step, with a checkpoint; Ctrl-C again ends at once")

    def _end_at_once(self, words: str) -> NoReturn:
        """End the process, whatever it is in: a lock that the main thread holds stops nothing."""
        _say(words)
        last = threading.Thread(target=self._do_at_last, daemon=True)
        last.start()
        last.join(self._grace_s)
        os._exit(INTERRUPTED_EXIT_CODE)

    def _do_at_last(self) -> None:
        for do in reversed(self._at_last):
            do()


def _say(words: str) -> None:
    """Say it once a job; not by `print`, in whose lock the signal may have come."""
    if all(os.environ.get(name, "0") == "0" for name in _RANKS):
        os.write(2, f"\ngpipe_hpc: {words}\n".encode())
