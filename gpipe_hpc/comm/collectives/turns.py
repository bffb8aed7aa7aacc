"""Collectives that take turns on a thread of their own.

Why a thread: a plan has many steps, and each waits for other ranks. If they went on only while
somebody waits, nothing but the first step would be hidden behind computing. One thread for a group,
begun with its first plan, keeps the plans in the order in which they were started; that is the same
on all ranks, so their messages never mix. Torch lets go of the interpreter while it waits and adds.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Note = Callable[[Sequence[int] | None], None]
"""Takes the ranks that are waited for; None once they have come."""


class Turn:
    """One job: under way, or behind others."""

    def __init__(self, job: Callable[[Note], None]) -> None:
        self._job = job
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._awaited: Sequence[int] | None = None
        self._listener: Note | None = None

    def wait(self, listener: Note) -> None:
        """Return once it is done; raise what it has raised.

        `listener` is told for whom it waits, for as long as this call waits for it.
        """
        self._listener = listener
        listener(self._awaited)
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        listener(None)

    def do(self, failed: BaseException | None) -> BaseException | None:
        """Do the job unless one before it has failed; return the failure."""
        try:
            if failed is None:
                self._job(self._note)
        except BaseException as failure:
            failed = failure
        self._failure = failed
        del self._job  # and with it the tensors
        self._done.set()
        return failed

    def _note(self, ranks: Sequence[int] | None) -> None:
        self._awaited = ranks
        if self._listener is not None and ranks is not None:
            self._listener(ranks)


@dataclass
class _Line:
    """What the thread works on; not the turns' owner, which ends it by being dropped."""

    turns: "queue.SimpleQueue[Turn | None]" = field(default_factory=queue.SimpleQueue)


class Turns:
    """Do jobs one after the other on a thread; after a failure, none that is behind it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = _Line()
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[Note], None]) -> Turn:
        """Put a job at the end of the line. It is given a function to tell for whom it waits."""
        turn = Turn(job)
        self._line.turns.put(turn)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._line,), name=self._name, daemon=True
            )
            weakref.finalize(self, self._line.turns.put, None).atexit = False
            self._thread.start()
        return turn


def _work(line: _Line) -> None:
    failed: BaseException | None = None
    while (turn := line.turns.get()) is not None:
        failed = turn.do(failed)
        del turn  # or its tensors would live until the next one
