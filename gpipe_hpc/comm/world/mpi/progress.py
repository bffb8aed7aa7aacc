"""What is under way in MPI, and who asks whether it is done.

MPI moves messages while somebody calls it, and nothing can end a call that waits. So nobody here
waits in MPI: messages are started, and tested until they are done, the run has failed, or the time
is up. Whoever waits for one tests them all, at first without a pause. While nobody does, a thread
tests now and then: a message too long to be sent at once begins to move when both ends have called.

All calls are made under one lock, so an MPI that lets one thread in at a time is enough.
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

# A wait first tests so often without a pause, which costs a core and saves the time of waking up.
_NUM_EAGER: Final = 200
_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
# Of the thread, which nobody waits for.
_FIRST_LOOK_S: Final = 100e-6
_LONGEST_LOOK_S: Final = 2e-3
_LOOK_AT_CLOCK: Final = 64
# How often a wait looks whether the other end has left.
_LOOK_FOR_S: Final = 0.5


class Asked(Protocol):
    """What tells which of several requests are done."""

    def __call__(self, requests: "list[MPI.Request]") -> Sequence[tuple[int, int]]:
        """Return the positions of those that are done, each with the bytes that came.

        Raises RuntimeError, as MPI's error does, if one has failed.
        """


class Message:
    """A send or a receive under way, maybe in several parts."""

    __slots__ = ("_calls", "_num_left", "_progress", "failure", "is_done", "rank")

    def __init__(self, progress: "Progress", rank: int, num_parts: int) -> None:
        self._progress = progress
        self.rank = rank
        self.is_done, self.failure = False, ""
        self._num_left = num_parts
        self._calls: list[Callable[[], None]] = []

    def wait(self, limit_s: float) -> None:
        """Return once it is done; RuntimeError if it failed, or after so many seconds."""
        if not self.is_done:
            self._progress.wait(self, limit_s)
        if self.failure:
            raise RuntimeError(self.failure)

    def test(self) -> bool:
        """Say whether it is done, also where it failed."""
        if not self.is_done:
            self._progress.test()
        return self.is_done

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this once it is done or has failed, on any thread."""
        with self._progress.lock:
            if not self.is_done:
                self._calls.append(call)
                return
        call()

    def part_is_done(self) -> bool:
        """Note that a part is done; say whether it was the last."""
        self._num_left -= 1
        return self._num_left == 0

    def end(self, failure: str = "") -> list[Callable[[], None]]:
        """Note that it is done, or has failed; return what is to be called then."""
        self.failure = failure
        calls, self._calls = self._calls, []
        self.is_done = True
        return calls


class _Piece(NamedTuple):
    """What belongs to a request: `tensor` lives until MPI has done with its memory."""

    message: Message
    tensor: torch.Tensor
    expected_bytes: int | None  # of a receive


class _State:
    """What the thread knows: not the `Progress`, which ends it by being dropped."""

    def __init__(self, ask: Asked, has_left: Callable[[int], bool]) -> None:
        self.ask, self.has_left = ask, has_left
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.requests: list[MPI.Request] = []
        self.pieces: list[_Piece] = []
        self.num_waiting = 0
        self.is_over = False
        self.broken = ""


class Progress:
    """The messages of one process.

    `ask` is MPI's test of several requests. `has_left(rank)`: whether a rank has said that it ends.
    """

    def __init__(self, ask: Asked, has_left: Callable[[int], bool]) -> None:
        self._state = _State(ask, has_left)
        self.lock = self._state.lock
        self._thread: threading.Thread | None = None

    @property
    def broken(self) -> str:
        """Return why nothing is sent any more; empty while all is well."""
        return self._state.broken

    def start(
        self,
        rank: int,
        parts: Sequence[torch.Tensor],
        begin: "Callable[[torch.Tensor], MPI.Request]",
        *,
        is_receive: bool,
    ) -> Message:
        """Begin the parts of a message, in order; `rank`: the other end.

        A part that comes has the bytes that are expected, or the message fails.
        """
        state = self._state
        message = Message(self, rank, len(parts))
        with state.changed:
            if state.broken:
                raise RuntimeError(state.broken)
            for part in parts:
                state.requests.append(begin(part))
                state.pieces.append(_Piece(message, part, part.nbytes if is_receive else None))
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
        """Test all that is under way; say whether any was done."""
        return _test(self._state)

    def wait(self, message: Message, limit_s: float) -> None:
        """Return once a message is done; RuntimeError after so many seconds."""
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

    def _is_late(self, message: Message, is_late: bool) -> bool:
        """Say whether the other end has left; RuntimeError if it had by the last look.

        What it sent before may be seen after the word that it leaves.
        """
        with self.lock:
            has_left = self._state.has_left(message.rank)
        if has_left and is_late and not message.is_done:
            raise RuntimeError(f"rank {message.rank} has left")
        return has_left

    def break_off(self, why: str) -> None:
        """End all waits with an error; nothing is sent or received any more."""
        state = self._state
        with state.changed:
            state.broken = state.broken or why
            calls = _fail(state, state.broken)
        for call in calls:
            call()


def _test(state: _State) -> bool:
    """Test what is under way, unless another thread does; say whether anything has changed."""
    if not state.lock.acquire(blocking=False):
        return False
    try:
        if state.broken or not state.requests:
            return False
        try:
            done = state.ask(state.requests)
        except RuntimeError as error:
            # Of which request it is, MPI may not tell; and a run that lost a message has failed.
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


def _finish(state: _State, done: Sequence[tuple[int, int]]) -> list[Callable[[], None]]:
    """Take requests that are done out of those under way; return what is to be called."""
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


def _fail(state: _State, why: str) -> list[Callable[[], None]]:
    """Let all that is under way fail; MPI still has the memory, so what is there is kept."""
    calls: list[Callable[[], None]] = []
    for piece in state.pieces:
        if not piece.message.is_done:
            calls += piece.message.end(why)
    return calls


def _look(state: _State) -> None:
    """Test while something is under way and nobody waits for it."""
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


def _end(state: _State) -> None:
    with state.changed:
        state.is_over = True
        state.changed.notify_all()
