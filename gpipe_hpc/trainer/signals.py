"""Requests to stop, from outside: noted when they come, obeyed at the step's edge.

Before there are steps nothing is lost, and the process ends at once. Later it goes on to the edge
of the step: at a second Ctrl-C it ends at once, and after SIGTERM when the edge is not reached in
time, as whoever has sent that kills soon.

Python calls its handlers between two lines of the main thread, which may be in a call that waits
for another rank without end. So a thread of its own listens, too: the handler in C tells it.

Imports no torch: a signal that comes while torch still loads must find its handler.
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
INTERRUPTED_EXIT_CODE: Final = 128 + signal.SIGINT  # as shells say it

_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_ONE_PRESS_S: Final = 0.5
"""A launcher passes on a Ctrl-C that the terminal has sent to its processes too: that is one."""


class _Part(Enum):
    """Of a run."""

    START = "before the first step"
    STEPS = "between its steps"
    END = "behind the last step"


class Ending(NamedTuple):
    """How a process ends at once: the code, and why, in a line that names the rank."""

    code: int
    words: str


class StopRequest:
    """Remembers the first stop signal of this process; ends it where it cannot wait for the edge.

    Where it ends a process at once, what others want done at last is done before, for at most
    `grace_s` seconds.
    """

    def __init__(self, grace_s: float = 5.0) -> None:
        self.signal: signal.Signals | None = None
        self._part = _Part.START
        self._edge_limit_s: float | None = None
        self._doing: Callable[[], str] = lambda: "a step"
        self._is_obeyed = self._is_unhurried = False
        self._at_last: list[Callable[[Ending], object]] = []
        self._grace_s = grace_s
        self._came_s = 0.0
        self._term_s: float | None = None
        self._heard: socket.socket | None = None
        self._taking = threading.RLock()  # a handler may come while another one runs
        self._has_failed: Callable[[], bool] | None = None

    def listen(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        """Install the handlers; outside the main thread Python allows none, and none are set."""
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
    def came(self) -> bool:
        """Say whether this process was asked to stop."""
        return self.signal is not None

    @property
    def is_told_to_end(self) -> bool:
        """Say whether SIGTERM came while all was well, and not because another rank had failed."""
        return self._term_s is not None

    @contextmanager
    def joined(self, has_failed: Callable[[], bool]) -> Iterator[None]:
        """Return a block in which the ranks are together, so that a stopped run can go on later.

        `has_failed` says whether one of them has failed: a launcher then stops all others, which
        end by that failure and not as if somebody had asked them to.
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
        """Return a block that looks between steps whether a request `came`, and then calls `obey`.

        `edge_limit_s`: how long after SIGTERM it may take to do so; None: without end. `doing` says
        what the process is in, for whoever wonders why it took longer; any thread may call it.
        """
        self._edge_limit_s, self._doing = edge_limit_s, doing
        self._part = _Part.STEPS
        try:
            yield
        finally:
            self._part = _Part.END

    def await_signal(self, limit_s: float) -> None:
        """Return once this process itself was asked to stop, or after so many seconds."""
        deadline = time.monotonic() + limit_s
        while not self.came and time.monotonic() < deadline:
            time.sleep(0.02)

    def obey(self) -> None:
        """Note that the edge is reached and the run ends: it may take its time to save."""
        self._is_obeyed = True

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Return a block, such as a save, that is not cut off because the edge is not reached."""
        self._is_unhurried = True
        try:
            yield
        finally:
            self._is_unhurried = False

    def start_again(self) -> None:
        """Note that the steps of another run are to come."""
        self._part, self._has_failed = _Part.START, None

    @contextmanager
    def doing_last(self, do: Callable[[Ending], object]) -> Iterator[None]:
        """Return a block in which a process that ends at once does this, the last told first.

        It is done by another thread, so it must not need a lock that the main thread may hold.
        """
        self._at_last.append(do)
        try:
            yield
        finally:
            self._at_last.remove(do)

    def note_failure(self) -> None:
        """Note that this process has failed: a launcher then stops all, which is no request.

        Returns unless another thread is about to end this process, which needs no second word.
        """
        with self._taking:  # who ends the process keeps it
            self._has_failed = lambda: True

    def _forget_in_child(self) -> None:
        """Let a forked process neither tell this one of its signals nor read those of this one."""
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
        self._heard = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        with self._taking:
            self._take_all()
            if not self.came:  # somebody else has taken the place where signals are told
                self._take(number)

    def _listen(self) -> None:
        heard = self._heard
        assert heard is not None, "listens before it is told anything"
        poller = select.poll()
        poller.register(heard, select.POLLIN)
        while True:
            poller.poll(self._poll_ms())
            with self._taking:
                self._take_all()
                if self._is_late():
                    self._end_at_once(self._lateness(), REQUEUE_EXIT_CODE)

    def _take_all(self) -> None:
        """Take each signal that was heard, once, whoever comes first."""
        with suppress(BlockingIOError):
            while self._heard is not None:
                for number in self._heard.recv(1):
                    if number in STOP_SIGNALS:
                        self._take(number)

    def _poll_ms(self) -> int | None:
        """Return how long to wait for a signal: after SIGTERM the edge is looked for."""
        return None if self._term_s is None else 200

    def _is_late(self) -> bool:
        limit_s, began_s = self._edge_limit_s, self._term_s
        if limit_s is None or began_s is None or self._part is not _Part.STEPS:
            return False
        if self._is_obeyed or self._is_unhurried:
            return False
        return time.monotonic() > began_s + limit_s

    def _knows_of_failure(self) -> bool:
        return self._has_failed is not None and self._has_failed()

    def _lateness(self) -> str:
        return (
            f"expected to reach the edge of the step within {self._edge_limit_s:g} s of SIGTERM, "
            f"got no further than {self._doing()}; it ends before it is killed, and goes on from "
            f"the newest checkpoint when it is started again. Where whoever stops it waits longer, "
            f"raise train.stop_grace_s"
        )

    def _take(self, number: int) -> None:
        now_s = time.monotonic()
        is_interrupt = number == signal.SIGINT
        is_repeated = self.came and now_s - self._came_s > _ONE_PRESS_S
        if is_interrupt and (is_repeated or self._part is not _Part.STEPS):
            is_early = self._part is _Part.START and not is_repeated
            when = "before the first step, so nothing is lost" if is_early else "now"
            self._end_at_once(f"interrupted: ends {when}", INTERRUPTED_EXIT_CODE)
        name = signal.Signals(number).name
        if not is_interrupt and self._part is _Part.START and not self._knows_of_failure():
            words = f"stopped by {name} before the first step, so nothing is lost"
            code = 128 + number if self._has_failed is None else REQUEUE_EXIT_CODE
            self._end_at_once(words, code)
        if number == signal.SIGTERM and self._term_s is None and not self._knows_of_failure():
            self._term_s = now_s
        if not self.came:
            self.signal, self._came_s = signal.Signals(number), now_s
            if is_interrupt:
                _say("stopping after this step, with a checkpoint; Ctrl-C again ends at once")

    def _end_at_once(self, words: str, code: int) -> NoReturn:
        """End the process, whatever it is in: a lock that the main thread holds stops nothing."""
        named = f"{_own_name()} on {socket.gethostname()}: {words}"
        if code == INTERRUPTED_EXIT_CODE:
            _say(words)
        else:
            _write(f"gpipe_hpc: {named}\n")
        ending = Ending(code, named)
        last = threading.Thread(target=self._do_at_last, args=(ending,), daemon=True)
        last.start()
        last.join(self._grace_s)
        os._exit(code)

    def _do_at_last(self, ending: Ending) -> None:
        for do in reversed(self._at_last):
            do(ending)


def _own_name() -> str:
    """Return this process as a message names it, also before it has joined the others."""
    ranks = (os.environ.get(name) for name in _RANKS)
    return f"rank {next(filter(None, ranks), '0')}"


def _say(words: str) -> None:
    """Say it once a job; not by `print`, in whose lock the signal may have come."""
    if all(os.environ.get(name, "0") == "0" for name in _RANKS):
        _write(f"\ngpipe_hpc: {words}\n")


def _write(text: str) -> None:
    """Write to standard error; what takes nothing more is no reason not to end."""
    with suppress(OSError):
        os.write(2, text.encode())
