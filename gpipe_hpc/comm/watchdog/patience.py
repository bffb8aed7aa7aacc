"""Work of some ranks that takes longer than any wait between ranks may."""

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import torch

from gpipe_hpc.comm.watchdog.at_work import Watched, Work
from gpipe_hpc.comm.world.world import World, together
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import StalledError

T = TypeVar("T")

log = logging.getLogger("gpipe_hpc.comm")

_MEET_EVERY_S: Final = 1.0
_SAY_AFTER_S: Final = 60.0
_NUM_LOOKS: Final = 20  # in the time in which idle work ends: on a large host each takes a while


def patiently(
    world: World, where: str, work: Callable[[], T] | None, *, idle_s: float = math.inf
) -> T | None:
    """Do `work` on those ranks that have some, while all stay in touch; return its result.

    Every rank calls it. The work is done by a thread of its own, and the ranks meet once a second
    until all are done: so none waits for long in one collective, which a time-out would end, and
    the failure of one is heard of by all. What `work` raises is raised on its rank. Work that takes
    long says where it is after a minute, and then each time after twice as long. A file system that
    does not answer raises nothing: work that neither reads, writes nor computes for `idle_s` ends
    all with a StalledError.
    """
    began_s = time.monotonic()
    with together(world, where):
        done = None if work is None else Work(partial(_on_device, world.device, work))
        looks = None if done is None else _Looks(world, where, done.thread, idle_s)
        while True:
            if done is not None:
                done.wait(_MEET_EVERY_S)
            num_left = torch.tensor([0 if done is None or done.is_over else 1])
            world.everybody.all_reduce(num_left)
            spent_s = time.monotonic() - began_s
            world.activity = f"{where} for {spent_s:.0f} s"
            if done is not None and looks is not None and not done.is_over:
                looks.look(spent_s)
            if not num_left.item():
                return None if done is None else done.result()


def _on_device(device: Device, work: Callable[[], T]) -> T:
    """Do work on a new thread, which knows no device yet."""
    device.use()
    return work()


class _Looks:
    """Looks at a thread that works: says where it is if that takes long, and ends it if idle."""

    def __init__(self, world: World, where: str, thread: threading.Thread, idle_s: float) -> None:
        self._world, self._where, self._idle_s = world, where, idle_s
        self._watched = Watched(thread)
        self._say_s, self._look_s = _SAY_AFTER_S, 0.0

    def look(self, spent_s: float) -> None:
        """Look, if it is time to; StalledError where nothing is done any more."""
        if spent_s > self._say_s:
            log.warning(
                "rank %d: %s takes long, %.0f s so far; it is now in\n%s",
                *(self._world.rank, self._where, spent_s, self._watched.stack()),
            )
            self._say_s *= 2
        if spent_s <= self._look_s:
            return
        self._look_s = spent_s + self._idle_s / _NUM_LOOKS
        if self._watched.idle_s() > self._idle_s:
            raise StalledError(
                f"{self._where}: did not read, write or compute for {self._idle_s:g} s; check "
                "whether the file system of the data answers, or raise comm.timeout_s. It is "
                f"in\n{self._watched.stack()}"
            )


def patiently_here(
    world: World, where: str, work: Callable[[], T] | None, *, idle_s: float = math.inf
) -> T | None:
    """Do as `patiently` does, with the work on the calling thread: another one meets the ranks.

    For what is to be measured where it will run. The calling thread hears of another rank's
    failure once its work is done. Where its work does nothing for `idle_s` the others end.
    """
    if work is None:
        return patiently(world, where, None)
    with together(world, where):
        meetings = _Meetings(world, where, idle_s)
        try:
            found = work()
        except BaseException:
            meetings.break_off()
            raise
        meetings.end()
    return found


class _Meetings:
    """A thread that meets the other ranks once a second while the calling one works."""

    def __init__(self, world: World, where: str, idle_s: float) -> None:
        self._world, self._where = world, where
        self._looks = _Looks(world, where, threading.current_thread(), idle_s)
        self._over, self._is_broken_off = threading.Event(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{where}: in touch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Return once the work of all ranks is done; raises what ended the meetings before."""
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def break_off(self) -> None:
        """Come to no further meeting: this rank has failed, and the others are told otherwise."""
        self._is_broken_off = True
        self._over.set()

    def _run(self) -> None:
        try:
            self._world.device.use()
            self._meet()
        except StalledError as error:
            self._error = error
            self._world.fail(f"rank {self._world.rank}: {error}")
        except BaseException as error:
            self._error = error

    def _meet(self) -> None:
        began_s = time.monotonic()
        while True:
            is_over = self._over.wait(_MEET_EVERY_S)
            if self._is_broken_off:
                return
            num_left = torch.tensor([0 if is_over else 1])
            self._world.everybody.all_reduce(num_left)
            if not num_left.item() or self._is_broken_off:
                return
            spent_s = time.monotonic() - began_s
            self._world.activity = f"{self._where} for {spent_s:.0f} s"
            if not is_over:
                self._looks.look(spent_s)
