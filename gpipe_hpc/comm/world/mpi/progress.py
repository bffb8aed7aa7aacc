"""Progress of MPI messages without blocking calls.

MPI advances messages only while one of its functions runs, and a blocking call cannot be
interrupted. So messages are started and then tested until they are complete, the run has failed or
the time-out expires. A thread that waits for one message tests all of them, at first without
pauses. If no thread waits, a background thread tests now and then, because a long message starts to
move only when both ends call MPI.

All calls are made under one lock, so MPI_THREAD_SERIALIZED is sufficient.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from mpi4py import MPI

# Number of tests without a pause at the start of a wait: saves wake-up time, but uses a core.
_NUM_EAGER: Final = 200
_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
# Pauses of the background thread.
_FIRST_LOOK_S: Final = 100e-6
_LONGEST_LOOK_S: Final = 2e-3
_LOOK_AT_CLOCK: Final = 64
# Interval between checks whether the peer has announced its end.
_LOOK_FOR_S: Final = 0.5


class RequestTest(Protocol):
    """Interface of the function that tests which of several requests are complete."""

    def __call__(self, requests: "list[MPI.Request]") -> Sequence[tuple[int, int]]:
        """Return the positions of completed requests, each with the number of bytes received.

        Raises RuntimeError, the base class of MPI's exception, if one has failed.
        """


class MpiMessage:
    """A send or receive in progress, possibly in several parts."""

    __slots__ = ("_calls", "_num_left", "_progress", "failure", "is_done", "rank")

    def __init__(self, progress: "MpiProgress", rank: int, num_parts: int) -> None:
        self._progress = progress
        self.rank = rank
        self.is_done, self.failure = False, ""
        self._num_left = num_parts
        self._calls: list[Callable[[], None]] = []

    def wait(self, limit_s: float) -> None:
        """Block until the message is complete; RuntimeError on failure or time-out."""
        if not self.is_done:
            self._progress.wait(self, limit_s)
        if self.failure:
            raise RuntimeError(self.failure)

    def test(self) -> bool:
        """Return whether the message is complete or has failed."""
        if not self.is_done:
            self._progress.test()
        return self.is_done

    def when_done(self, call: Callable[[], None]) -> None:
        """Run `call` once the message is complete or has failed, on any thread."""
        with self._progress.lock:
            if not self.is_done:
                self._calls.append(call)
                return
        call()

    def part_is_done(self) -> bool:
        """Record that one more part is complete; return whether it was the last."""
        self._num_left -= 1
        return self._num_left == 0

    def end(self, failure: str = "") -> list[Callable[[], None]]:
        """Mark the message as complete or failed; return the callbacks to run."""
        self.failure = failure
        calls, self._calls = self._calls, []
        self.is_done = True
        return calls


class _RequestData(NamedTuple):
    """A request in progress and its tensor, kept alive until MPI no longer uses the memory."""

    message: MpiMessage
    tensor: torch.Tensor
    expected_bytes: int | None  # of a receive


class _ProgressState:
    """State shared with the background thread.

    It does not reference `MpiProgress`, whose garbage collection ends the thread.
    """

    def __init__(self, ask: RequestTest, has_left: Callable[[int], bool]) -> None:
        self.ask, self.has_left = ask, has_left
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.requests: list[MPI.Request] = []
        self.pieces: list[_RequestData] = []
        self.num_waiting = 0
        self.is_over = False
        self.broken = ""


class MpiProgress:
    """The MPI messages of one process.

    Args:
        ask: tests which of several requests are complete.
        has_left: returns whether a rank has announced that it ends.
    """

    def __init__(self, ask: RequestTest, has_left: Callable[[int], bool]) -> None:
        self._state = _ProgressState(ask, has_left)
        self.lock = self._state.lock
        self._thread: threading.Thread | None = None

    @property
    def broken(self) -> str:
        """Return why no message can be sent or received any more; empty if they can."""
        return self._state.broken

    def start(
        self,
        rank: int,
        parts: Sequence[torch.Tensor],
        begin: "Callable[[torch.Tensor], MPI.Request]",
        *,
        is_receive: bool,
    ) -> MpiMessage:
        """Start the parts of a message to or from `rank`, in order.

        A received part must have the expected number of bytes; otherwise the message fails.
        """
        state = self._state
        message = MpiMessage(self, rank, len(parts))
        with state.changed:
            if state.broken:
                raise RuntimeError(state.broken)
            for part in parts:
                state.requests.append(begin(part))
                state.pieces.append(
                    _RequestData(message, part, part.nbytes if is_receive else None)
                )
            if self._thread is None:
                self._begin_thread()
            state.changed.notify_all()
        return message

    def _begin_thread(self) -> None:
        state = self._state
        weakref.finalize(self, _end, state).atexit = False
        self._thread = threading.Thread(target=_look, args=(state,), name="mpi", daemon=True)
        self._thread.start()

    def test(self) -> bool:
        """Test all messages in progress; return whether any was completed."""
        return _test(self._state)

    def wait(self, message: MpiMessage, limit_s: float) -> None:
        """Block until a message is complete; RuntimeError after `limit_s` seconds."""
        state, pause_s, num_tests = self._state, _FIRST_PAUSE_S, 0
        end_s = time.monotonic() + limit_s
        look_s, is_late = end_s - limit_s + _LOOK_FOR_S, False
        with state.lock:
            state.num_waiting += 1
        try:
            while not message.is_done:
                if _test(state):
                    num_tests = 0
                    continue
                num_tests += 1
                if num_tests < _NUM_EAGER:
                    os.sched_yield()
                    if num_tests % _LOOK_AT_CLOCK:
                        continue
                else:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                now_s = time.monotonic()
                if now_s > end_s:
                    raise RuntimeError(f"rank {message.rank} timed out after {limit_s:g} s")
                if now_s > look_s:
                    look_s = now_s + _LOOK_FOR_S
                    is_late = self._is_late(message, is_late)
        finally:
            with state.lock:
                state.num_waiting -= 1

    def _is_late(self, message: MpiMessage, is_late: bool) -> bool:
        """Return whether the peer has announced its end; RuntimeError if it had at the last check.

        Data that the peer sent earlier may arrive after the announcement, hence the second check.
        """
        with self.lock:
            has_left = self._state.has_left(message.rank)
        if has_left and is_late and not message.is_done:
            raise RuntimeError(f"rank {message.rank} has left")
        return has_left

    def break_off(self, why: str) -> None:
        """End all waits with an error; no message is sent or received from now on."""
        state = self._state
        with state.changed:
            state.broken = state.broken or why
            calls = _fail(state, state.broken)
        for call in calls:
            call()


def _test(state: _ProgressState) -> bool:
    """Test all messages, unless another thread does; return whether any has completed."""
    if not state.lock.acquire(blocking=False):
        return False
    try:
        if state.broken or not state.requests:
            return False
        try:
            done = state.ask(state.requests)
        except RuntimeError as error:
            # MPI may not report which request failed, and a lost message ends the run anyway.
            state.broken = f"MPI: {error}"
            calls = _fail(state, state.broken)
        else:
            if not done:
                return False
            calls = _finish(state, done)
    finally:
        state.lock.release()
    for call in calls:
        call()
    return True


def _finish(state: _ProgressState, done: Sequence[tuple[int, int]]) -> list[Callable[[], None]]:
    """Remove completed requests from the state; return the callbacks to run."""
    calls: list[Callable[[], None]] = []
    for position, came_bytes in done:
        message, _, expected_bytes = state.pieces[position]
        failure = ""
        if expected_bytes is not None and came_bytes != expected_bytes:
            failure = f"expected {expected_bytes} bytes from rank {message.rank}, got {came_bytes}"
        is_last = message.part_is_done()
        if not message.is_done and (is_last or failure):
            calls += message.end(failure)
    gone = {position for position, _ in done}
    state.requests = [each for at, each in enumerate(state.requests) if at not in gone]
    state.pieces = [each for at, each in enumerate(state.pieces) if at not in gone]
    return calls


def _fail(state: _ProgressState, why: str) -> list[Callable[[], None]]:
    """Mark all messages as failed; their tensors stay alive, because MPI still uses the memory."""
    calls: list[Callable[[], None]] = []
    for piece in state.pieces:
        if not piece.message.is_done:
            calls += piece.message.end(why)
    return calls


def _look(state: _ProgressState) -> None:
    """Test messages from the background thread whenever no other thread waits for one."""
    pause_s = _FIRST_LOOK_S
    while True:
        with state.changed:
            while not state.is_over and (state.broken or not state.requests):
                pause_s = _FIRST_LOOK_S
                state.changed.wait()
            if state.is_over:
                return
        is_idle = state.num_waiting > 0 or not _test(state)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S) if is_idle else _FIRST_LOOK_S
        time.sleep(pause_s)


def _end(state: _ProgressState) -> None:
    with state.changed:
        state.is_over = True
        state.changed.notify_all()
