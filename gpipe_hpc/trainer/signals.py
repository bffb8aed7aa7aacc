"""Stop requests by signals, which take effect at the next step boundary.

Before the first step nothing is lost, and the process exits at once. Later it continues to the step
boundary; it exits at once at a second Ctrl-C, and after SIGTERM if the boundary is not reached in
time, since SIGKILL usually follows.

Python runs signal handlers between bytecodes of the main thread, which may be blocked in a call
that waits for another rank. A separate thread therefore also receives signals, through the wakeup
file descriptor that CPython's C handler writes to.

This module does not import torch: the handler must be installed before torch is imported.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType
from typing import Final, NamedTuple, NoReturn

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REQUEUE_EXIT_CODE: Final = 75  # EX_TEMPFAIL of sysexits.h: try again
INTERRUPTED_EXIT_CODE: Final = 128 + signal.SIGINT  # the convention of shells

_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_ONE_PRESS_S: Final = 0.5
"""Seconds within which two SIGINT are one Ctrl-C, sent by the terminal and by a launcher."""


class _RunPhase(Enum):
    """Phase of a run."""

    START = "before the first step"
    STEPS = "between its steps"
    END = "after the last step"


class ProcessExit(NamedTuple):
    """Exit code of a process that exits immediately, and a message that names its rank."""

    code: int
    words: str


class StopRequest:
    """Handler of signals that ask this process to stop, at the next step boundary or at once.

    Before an immediate exit, registered callbacks (`before_exit`) run for at most `grace_s` s.
    """

    def __init__(self, grace_s: float = 5.0) -> None:
        self.signal: signal.Signals | None = None
        self._part = _RunPhase.START
        self._edge_limit_s: float | None = None
        self._doing: Callable[[], str] = lambda: "a step"
        self._is_obeyed = self._is_unhurried = False
        self._at_last: list[Callable[[ProcessExit], object]] = []
        self._grace_s = grace_s
        self._came_s = 0.0
        self._term_s: float | None = None
        self._heard: socket.socket | None = None
        self._taking = threading.RLock()  # a signal handler may interrupt another one
        self._has_failed: Callable[[], bool] | None = None

    def listen(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Install the signal handlers; does nothing outside the main thread (a limit of Python)."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._heard, told = socket.socketpair()
        self._heard.setblocking(False)
        told.setblocking(False)
        signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget_in_child)
        for number in signals:
            signal.signal(number, self._note)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    @property
    def is_requested(self) -> bool:
        """Return whether this process was asked to stop."""
        return self.signal is not None

    @property
    def was_terminated(self) -> bool:
        """Return whether SIGTERM arrived before any rank was known to have failed."""
        return self._term_s is not None

    @contextmanager
    def joined(self, has_failed: Callable[[], bool]) -> Iterator[None]:
        """Context manager for the time when ranks are connected and a stopped run is resumable.

        SIGTERM and SIGUSR1 before the first step then exit with REQUEUE_EXIT_CODE. `has_failed`
        returns whether a rank has failed: a launcher then sends SIGTERM to all others, which must
        not count as a request to stop.
        """
        self._has_failed = has_failed
        try:
            yield
        except BaseException:
            self.note_failure()
            raise
        self._has_failed = None

    @contextmanager
    def between_steps(
        self, edge_limit_s: float | None = None, doing: Callable[[], str] = lambda: "a step"
    ) -> Iterator[None]:
        """Context manager for the training loop, which checks `came` at step boundaries.

        The loop calls `obey` when it stops.

        Args:
            edge_limit_s: seconds after SIGTERM within which a boundary must be reached; None: no
                limit.
            doing: returns the current activity for the message; called by any thread.
        """
        self._edge_limit_s, self._doing = edge_limit_s, doing
        self._part = _RunPhase.STEPS
        try:
            yield
        finally:
            self._part = _RunPhase.END

    def await_signal(self, limit_s: float) -> None:
        """Wait until this process is asked to stop, but at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while not self.is_requested and time.monotonic() < deadline:
            time.sleep(0.02)

    def accept(self) -> None:
        """Record that the loop is ending, which suspends the time limit after SIGTERM."""
        self._is_obeyed = True

    @contextmanager
    def without_deadline(self) -> Iterator[None]:
        """Context manager, for example for a save, that suspends the time limit after SIGTERM."""
        self._is_unhurried = True
        try:
            yield
        finally:
            self._is_unhurried = False

    def reset(self) -> None:
        """Reset the phase for another run in this process."""
        self._part, self._has_failed = _RunPhase.START, None

    @contextmanager
    def before_exit(self, do: Callable[[ProcessExit], object]) -> Iterator[None]:
        """Register a callback to run before an immediate exit; the last registered runs first.

        The callback runs in another thread and must not need a lock that the main thread may hold.
        """
        self._at_last.append(do)
        try:
            yield
        finally:
            self._at_last.remove(do)

    def note_failure(self) -> None:
        """Record that this process has failed, so that a launcher's SIGTERM is not a stop request.

        Does not return if another thread is exiting the process.
        """
        with self._taking:  # a thread that exits the process does not release it
            self._has_failed = lambda: True

    def _forget_in_child(self) -> None:
        """Detach a forked child from the parent's wakeup socket."""
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
        self._heard = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        with self._taking:
            self._take_all()
            if not self.is_requested:  # other code has replaced the wakeup file descriptor
                self._take(number)

    def _listen(self) -> None:
        heard = self._heard
        assert heard is not None, "listen() creates the socket"
        poller = select.poll()
        poller.register(heard, select.POLLIN)
        while True:
            poller.poll(self._poll_ms())
            with self._taking:
                self._take_all()
                if self._is_late():
                    self._end_at_once(self._lateness(), REQUEUE_EXIT_CODE)

    def _take_all(self) -> None:
        """Process each received signal once, in whichever thread gets it first."""
        with suppress(BlockingIOError):
            while self._heard is not None:
                for number in self._heard.recv(1):
                    if number in STOP_SIGNALS:
                        self._take(number)

    def _poll_ms(self) -> int | None:
        """Return the poll timeout in ms: None, or short after SIGTERM, to check its time limit."""
        return None if self._term_s is None else 200

    def _is_late(self) -> bool:
        limit_s, began_s = self._edge_limit_s, self._term_s
        if limit_s is None or began_s is None or self._part is not _RunPhase.STEPS:
            return False
        if self._is_obeyed or self._is_unhurried:
            return False
        return time.monotonic() > began_s + limit_s

    def _knows_of_failure(self) -> bool:
        return self._has_failed is not None and self._has_failed()

    def _lateness(self) -> str:
        return (
            f"the step did not end within {self._edge_limit_s:g} s after SIGTERM "
            f"(still in {self._doing()}); exiting before being killed: a restart continues from "
            f"the newest checkpoint. If the scheduler waits longer before it kills, raise "
            f"train.stop_grace_s"
        )

    def _take(self, number: int) -> None:
        now_s = time.monotonic()
        is_interrupt = number == signal.SIGINT
        is_repeated = self.is_requested and now_s - self._came_s > _ONE_PRESS_S
        if is_interrupt and (is_repeated or self._part is not _RunPhase.STEPS):
            is_early = self._part is _RunPhase.START and not is_repeated
            when = "before the first step, so nothing is lost" if is_early else "now"
            self._end_at_once(f"interrupted: ends {when}", INTERRUPTED_EXIT_CODE)
        name = signal.Signals(number).name
        if not is_interrupt and self._part is _RunPhase.START and not self._knows_of_failure():
            words = f"stopped by {name} before the first step, so nothing is lost"
            code = 128 + number if self._has_failed is None else REQUEUE_EXIT_CODE
            self._end_at_once(words, code)
        if number == signal.SIGTERM and self._term_s is None and not self._knows_of_failure():
            self._term_s = now_s
        if not self.is_requested:
            self.signal, self._came_s = signal.Signals(number), now_s
            if is_interrupt:
                _say("stopping after this step, with a checkpoint; press Ctrl-C again to exit now")

    def _end_at_once(self, words: str, code: int) -> NoReturn:
        """Exit the process at once, even if the main thread is blocked or holds a lock."""
        named = f"{_own_name()} on {socket.gethostname()}: {words}"
        if code == INTERRUPTED_EXIT_CODE:
            _say(words)
        else:
            _write(f"gpipe_hpc: {named}\n")
        ending = ProcessExit(code, named)
        last = threading.Thread(target=self._do_at_last, args=(ending,), daemon=True)
        last.start()
        last.join(self._grace_s)
        os._exit(code)

    def _do_at_last(self, ending: ProcessExit) -> None:
        for do in reversed(self._at_last):
            do(ending)


def _own_name() -> str:
    """Return this process's name for messages, also before it has joined the other ranks."""
    ranks = (os.environ.get(name) for name in _RANKS)
    return f"rank {next(filter(None, ranks), '0')}"


def _say(words: str) -> None:
    """Print a message once per job; not with `print`, whose lock the main thread may hold."""
    if all(os.environ.get(name, "0") == "0" for name in _RANKS):
        _write(f"\ngpipe_hpc: {words}\n")


def _write(text: str) -> None:
    """Write to standard error, ignoring errors."""
    with suppress(OSError):
        os.write(2, text.encode())
