"""Execution of work that may take longer than the time-out of collectives, on some of the ranks."""

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import torch

from gpipe_hpc.comm.watchdog.background_call import BackgroundCall, ThreadProgress
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import StalledError

T = TypeVar("T")

log = logging.getLogger("gpipe_hpc.comm")

_MEET_EVERY_S: Final = 1.0
_SAY_AFTER_S: Final = 60.0
_NUM_LOOKS: Final = 20  # checks within idle_s; on a large host each one takes a while


def run_with_heartbeat(
    world: World, where: str, work: Callable[[], T] | None, *, idle_s: float = math.inf
) -> T | None:
    """Run `work`, or nothing if None, while all ranks stay in contact; return its result.

    A collective call. The work runs on a background thread, and the ranks synchronize once a second
    until all are done. So no rank waits in a collective until it times out, and all ranks notice
    the failure of one. Exceptions of `work` are raised on its rank. Long work is logged with its
    stack after a minute, and then at doubling intervals. Because an unresponsive file system raises
    no error, work that neither reads, writes nor computes for `idle_s` seconds ends all ranks with
    a StalledError.
    """
    began_s = time.monotonic()
    with collective_errors(world, where):
        done = None if work is None else BackgroundCall(partial(_on_device, world.device, work))
        looks = None if done is None else _ProgressMonitor(world, where, done.thread, idle_s)
        while True:
            if done is not None:
                done.wait(_MEET_EVERY_S)
            num_left = torch.tensor([0 if done is None or done.is_over else 1])
            world.world_group.all_reduce(num_left)
            spent_s = time.monotonic() - began_s
            world.activity = f"{where} for {spent_s:.0f} s"
            if done is not None and looks is not None and not done.is_over:
                looks.look(spent_s)
            if not num_left.item():
                return None if done is None else done.result()


def _on_device(device: Device, work: Callable[[], T]) -> T:
    """Run `work` on a new thread whose current device is `device`."""
    device.use()
    return work()


class _ProgressMonitor:
    """Monitor of a working thread: logs its stack if the work is long, raises if it is idle."""

    def __init__(self, world: World, where: str, thread: threading.Thread, idle_s: float) -> None:
        self._world, self._where, self._idle_s = world, where, idle_s
        self._watched = ThreadProgress(thread)
        self._say_s, self._look_s = _SAY_AFTER_S, 0.0

    def look(self, spent_s: float) -> None:
        """Check the thread if the next check is due; raise StalledError if the thread is idle."""
        if spent_s > self._say_s:
            log.warning(
                "rank %d: %s has been running for %.0f s; its stack:\n%s",
                *(self._world.rank, self._where, spent_s, self._watched.stack()),
            )
            self._say_s *= 2
        if spent_s <= self._look_s:
            return
        self._look_s = spent_s + self._idle_s / _NUM_LOOKS
        if self._watched.idle_s() > self._idle_s:
            raise StalledError(
                f"{self._where}: did not read, write or compute for {self._idle_s:g} s; check "
                "whether the file system of the data responds, or raise comm.timeout_s. Its "
                f"stack:\n{self._watched.stack()}"
            )


def run_here_with_heartbeat(
    world: World, where: str, work: Callable[[], T] | None, *, idle_s: float = math.inf
) -> T | None:
    """Run `work` on the calling thread, while a background thread keeps contact with other ranks.

    Otherwise like `run_with_heartbeat`. For work that must be measured on the thread on which it
    will run later. The calling thread notices another rank's failure after its work. If the work is
    idle for `idle_s` seconds, the other ranks end.
    """
    if work is None:
        return run_with_heartbeat(world, where, None)
    with collective_errors(world, where):
        meetings = _KeepAlive(world, where, idle_s)
        try:
            found = work()
        except BaseException:
            meetings.break_off()
            raise
        meetings.end()
    return found


class _KeepAlive:
    """A thread that synchronizes with the other ranks once a second while the caller works."""

    def __init__(self, world: World, where: str, idle_s: float) -> None:
        self._world, self._where = world, where
        self._looks = _ProgressMonitor(world, where, threading.current_thread(), idle_s)
        self._over, self._is_broken_off = threading.Event(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{where}: in touch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Block until the work of all ranks is done; raise the exception of the thread, if any."""
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def break_off(self) -> None:
        """Stop synchronizing: this rank has failed and reports its failure separately."""
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
            self._world.world_group.all_reduce(num_left)
            if not num_left.item() or self._is_broken_off:
                return
            spent_s = time.monotonic() - began_s
            self._world.activity = f"{self._where} for {spent_s:.0f} s"
            if not is_over:
                self._looks.look(spent_s)
