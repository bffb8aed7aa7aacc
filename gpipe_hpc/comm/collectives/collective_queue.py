"""A queue of collectives that a background thread executes in order.

A plan has many steps, and each waits for other ranks. If the steps advanced only while a caller
waits, no step but the first would overlap with computation; hence the thread. The thread is started
with the first plan of a group and executes the plans in the order in which they were started. This
order is the same on all ranks, so their messages never mix. torch releases the GIL while it waits
and adds. A caller that waits for a job that has not begun executes the job itself: this saves two
thread switches, which cost more than a small message.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpipe_hpc.comm.collectives.group import CompletionCallbacks
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener, ignore_wait


class QueuedCollective:
    """One job in the queue."""

    def __init__(self, line: "_QueueState", job: Callable[[WaitListener], None]) -> None:
        self._line = line
        self._job: Callable[[WaitListener], None] | None = job
        self._done = threading.Event()
        self.calls = CompletionCallbacks()
        self._failure: BaseException | None = None
        self._awaited: Sequence[int] | None = None
        self._listener: WaitListener | None = None

    @property
    def is_done(self) -> bool:
        """Return whether the job is complete or has failed."""
        return self._done.is_set()

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` once the job is complete or has failed."""
        self.calls.add(call)

    def wait(self, listener: WaitListener = ignore_wait) -> None:
        """Block until the job is complete, executing queued jobs meanwhile; raise its exception.

        `listener` receives the ranks that the job waits for, as long as this call blocks.
        """
        self._listener = listener
        listener(self._awaited)
        _advance(self._line, self)
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        listener(None)

    def wait_for_thread(self) -> None:
        """Block until the background thread has executed the job; raise its exception.

        For jobs that wait for a device, for which the calling thread must not wait itself.
        """
        self._done.wait()
        if self._failure is not None:
            raise self._failure

    def do(self, failed: BaseException | None) -> BaseException | None:
        """Run the job unless an earlier one has failed; return the exception, if any."""
        job, self._job = self._job, None  # release the tensors that the job references
        assert job is not None, "a job runs only once"
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
class _QueueState:
    """State of a queue shared by its threads.

    It does not reference `CollectiveQueue`, whose garbage collection ends the thread.
    """

    turns: deque[QueuedCollective] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_busy: bool = False
    is_over: bool = False
    failed: BaseException | None = None


class CollectiveQueue:
    """Queue of jobs that run one after the other; after a failure, no later one runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = _QueueState()
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[WaitListener], None]) -> QueuedCollective:
        """Append a job to the queue.

        The job is called with a function to which it reports the ranks that it waits for.
        """
        turn = QueuedCollective(self._line, job)
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


def _advance(line: _QueueState, last: QueuedCollective | None) -> None:
    """Run jobs in order, up to `last`, unless another thread is running one."""
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


def _work(line: _QueueState) -> None:
    while True:
        with line.changed:
            line.changed.wait_for(lambda: line.is_over or (line.turns and not line.is_busy))
            if line.is_over and not line.turns:
                return
        _advance(line, None)


def _end(line: _QueueState) -> None:
    with line.changed:
        line.is_over = True
        line.changed.notify_all()
