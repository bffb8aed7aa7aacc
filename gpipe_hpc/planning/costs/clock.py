"""The seconds that work takes, without those in which another process had the core."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from gpipe_hpc.comm.device import Device

Result = TypeVar("Result")

# Of Linux, for the thread that reads it: nanoseconds on a core, nanoseconds ready to run but
# without a core, and how often it got one (Documentation/scheduler/sched-stats.rst).
_SCHEDULED: Final = Path("/proc/thread-self/schedstat")


class Clock:
    """What the time is, and how long work takes. Tests have another one."""

    def now(self) -> float:
        """Return seconds since some time."""
        return time.monotonic()

    def timed(self, work: Callable[[], Result], device: Device) -> tuple[Result, float]:
        """Run `work` and return its result and the seconds the device needed for it.

        On CPUs the time in which this thread waited for a core is left out where the system tells
        it: a long layer never runs undisturbed on a busy machine, however often it is repeated,
        while a short one does. What other threads of a parallel layer waited is not known.
        """
        return _timed_by_events(work, device) if device.is_accelerator else _timed(work)


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    first, waited_before_s = time.perf_counter(), _waited_s()
    begin = time.perf_counter()
    result = work()
    end = time.perf_counter()
    waited_s = _waited_s() - waited_before_s
    # A wait may have come ahead of the work, or behind it: what is left out came surely within.
    outside_s = (begin - first) + (time.perf_counter() - end)
    return result, end - begin - max(0.0, waited_s - outside_s)


def _waited_s() -> float:
    try:
        return int(_SCHEDULED.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0  # another system, or a sandbox


def _timed_by_events(work: Callable[[], Result], device: Device) -> tuple[Result, float]:
    begin, end = device.event(timing=True), device.event(timing=True)
    device.synchronize()
    begin.record()
    result = work()
    end.record()
    end.synchronize()
    return result, begin.elapsed_ms(end) / 1e3
