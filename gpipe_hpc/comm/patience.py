"""Work of some ranks that takes longer than any wait between ranks may."""

import logging
import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

import torch

from gpipe_hpc.comm.at_work import Work
from gpipe_hpc.comm.world import World, together
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
    began_s, say_s, look_s = time.monotonic(), _SAY_AFTER_S, 0.0
    with together(world, where):
        done = None if work is None else Work(work)
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
            looks = done is not None and not done.is_over and spent_s > look_s
            look_s = spent_s + idle_s / _NUM_LOOKS if looks else look_s
            if looks and done is not None and done.idle_s() > idle_s:
                raise StalledError(
                    f"{where}: expected work that reads, writes or computes, got none of it for "
                    f"{idle_s:g} s; look whether the file system of the data answers, or raise "
                    f"comm.timeout_s. It is in\n{done.stack()}"
                )
            if not num_left.item():
                return None if done is None else done.result()
