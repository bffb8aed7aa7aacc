"""Collectives that take turns on a thread of their own.

Why a thread: a plan has many steps, and each waits for other ranks. If they went on only while
somebody waits, nothing but the first step would be hidden behind computing. One thread for a group,
begun with its first plan, keeps the plans in the order in which they were started; that is the same
on all ranks, so their messages never mix. Torch lets go of the interpreter while it waits and adds.
Who waits for a turn that has not begun does it himself: that saves two changes of threads, which
cost more than a small message.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpipe_hpc.comm.collectives.group import Calls
from gpipe_hpc.comm.watchdog.noting import Note


class Turn:
    """One job: under way, or behind others."""

    def __init__(self, line: "_Line", job: Callable[[Note], None]) -> None:
        self._line = line
        self._job: Callable[[Note], None] | None = job
        self._done = threading.Event()
        self.calls = Calls()
        self._failure: BaseException | None = None
        self._awaited: Sequence[int] | None = None
        self._listener: Note | None = None

    @property
    def is_done(self) -> bool:
        """Say whether it is done, or has failed."""
        return self._done.is_set()

    def wait(self, listener: Note) -> None:
        """Return once it is done; raise what it has raised.

        `listener` is told for whom it waits, for as long as this call waits for it.
        """
        self._listener = listener
        listener(self._awaited)
        _advance(self._line, self)
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        listener(None)

    def wait_for_thread(self) -> None:
        """Return once the line's own thread has done it; raise what it has raised.

        For jobs that wait for a device, which the calling thread shall not.
        """
        self._done.wait()
        if self._failure is not None:
            raise self._failure

    def do(self, failed: BaseException | None) -> BaseException | None:
        """Do the job unless one before it has failed; return the failure."""
        job, self._job = self._job, None  # and with it the tensors
        assert job is not None, "a turn comes once"
        try:
            if failed is None:
                job(self._note)
        except BaseException as failure:
            failed = failure
        self._failure = failed
        self._done.set()
        self.calls.make()
        return failed

    def _note(self, ranks: Sequence[int] | None) -> None:
        self._awaited = ranks
        if self._listener is not None and ranks is not None:
            self._listener(ranks)


@dataclass
class _Line:
    """What threads work on; not the turns' owner, which ends the line by being dropped."""

    turns: deque[Turn] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_busy: bool = False
    is_over: bool = False
    failed: BaseException | None = None


class Turns:
    """Do jobs one after the other; after a failure, none that is behind it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = _Line()
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[Note], None]) -> Turn:
        """Put a job at the end of the line. It is given a function to tell for whom it waits."""
        turn = Turn(self._line, job)
        with self._line.changed:
            self._line.turns.append(turn)
            self._line.changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._line,), name=self._name, daemon=True
            )
            weakref.finalize(self, _end, self._line).atexit = False
            self._thread.start()
        return turn


def _advance(line: _Line, last: Turn | None) -> None:
    """Do turns in their order, up to `last`, unless another thread is at one."""
    while True:
        with line.changed:
            if line.is_busy or not line.turns:
                return
            turn = line.turns.popleft()
            line.is_busy = True
        line.failed = turn.do(line.failed)
        with line.changed:
            line.is_busy = False
            line.changed.notify_all()
        if turn is last:
            return


def _work(line: _Line) -> None:
    while True:
        with line.changed:
            line.changed.wait_for(lambda: line.is_over or (line.turns and not line.is_busy))
            if line.is_over and not line.turns:
                return
        _advance(line, None)


def _end(line: _Line) -> None:
    with line.changed:
        line.is_over = True
        line.changed.notify_all()
