"""Work of some ranks that takes longer than any wait between ranks may."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import torch

from gpipe_hpc.comm.world import World, together

T = TypeVar("T")

log = logging.getLogger("gpipe_hpc.comm")

_MEET_EVERY_S: Final = 1.0
_SAY_AFTER_S: Final = 60.0
_NUM_FRAMES: Final = 4


def patiently(world: World, where: str, work: Callable[[], T] | None) -> T | None:
    """Do `work` on those ranks that have some, while all stay in touch; return its result.

    Every rank calls it. The work is done by a thread of its own, and the ranks meet once a second
    until all are done: so none waits for long in one collective, which a time-out would end, and
    the failure of one is heard of by all. What `work` raises is raised on its rank. Work that takes
    long says where it is after a minute, and then each time after twice as long: a file system
    that does not answer raises nothing.
    """
    began_s, say_s = time.monotonic(), _SAY_AFTER_S
    with together(world, where):
        done = None if work is None else _Work(work)
        while True:
            if done is not None:
                done.wait(_MEET_EVERY_S)
            num_left = torch.tensor([0 if done is None or done.is_over else 1])
            world.everybody.all_reduce(num_left)
            spent_s = time.monotonic() - began_s
            world.activity = f"{where} for {spent_s:.0f} s"
            if done is not None and spent_s > say_s and not done.is_over:
                log.warning(
                    "rank %d: %s takes long, %.0f s so far; it is now in\n%s",
                    *(world.rank, where, spent_s, done.stack()),
                )
                say_s *= 2
            if not num_left.item():
                return None if done is None else done.result()


class _Work(Generic[T]):
    """A call on a thread of its own; a daemon, so that nobody waits for it who has to leave."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call, self._over = call, threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        name = f"{threading.current_thread().name} at work"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Say whether it has returned; raises what it raised."""
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def wait(self, timeout_s: float) -> None:
        self._over.wait(timeout_s)

    def stack(self) -> str:
        """Return the calls that the work is in, the innermost last."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-_NUM_FRAMES:]) if frame else "(it has ended)"

    def result(self) -> T:
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:
            self._error = error
        self._over.set()
