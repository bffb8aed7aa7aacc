"""Requests to stop, from outside: noted when they come, obeyed at the step's edge.

Imports no torch: a signal that comes while torch still loads must find its handler.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT  # as shells say it


class StopRequest:
    """Remembers the first stop signal of this process."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_last: Callable[[], None] | None = None
        """What is left to do where an interrupted process ends by force."""

    def listen(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Install the handlers; outside the main thread Python allows none, and none are set."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._note)

    @property
    def came(self) -> bool:
        """Say whether this process was asked to stop."""
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)


def end_when_interrupted(grace_s: float = 10.0, stop: StopRequest | None = None) -> None:
    """Let Ctrl-C end this process for certain: by KeyboardInterrupt, or `grace_s` seconds later.

    By force it ends after what `stop` has to do at last.

    The exception may come between two instructions that take a lock and promise to release it,
    and whoever then cleans up waits for that lock forever. No effect outside the main thread.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(grace_s, _end_by_force, [stop])
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)


def _end_by_force(stop: StopRequest | None) -> None:
    try:
        if stop is not None and stop.at_last is not None:
            stop.at_last()
    finally:
        os._exit(INTERRUPTED_EXIT_CODE)
