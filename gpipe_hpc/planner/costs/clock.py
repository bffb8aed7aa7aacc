"""Measure the duration of work, excluding the time in which other processes used the CPU core."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import torch

from gpipe_hpc.device.device import Device

Result = TypeVar("Result")

# Linux, for the reading thread: nanoseconds on a core, nanoseconds runnable but waiting for a
# core, and number of time slices (Documentation/scheduler/sched-stats.rst).
_SCHEDULED: Final = Path("/proc/thread-self/schedstat")


class WorkClock:
    """Measures time and durations of work; tests replace it."""

    def __init__(self) -> None:
        self._lead: _FillerWork | None = None

    def now(self) -> float:
        """Return the current time of a monotonic clock in seconds."""
        return time.monotonic()

    def timed(self, work: Callable[[], Result], device: Device) -> tuple[Result, float]:
        """Run `work`; return its result and the seconds that it takes.

        On a CPU the time in which this thread waited for a core is subtracted if the system reports
        it, because a long layer never runs undisturbed on a busy machine, however often it is
        repeated. Waits of other threads of a parallel layer are unknown. On an accelerator the
        longer of the device time and the host's launch time is returned.
        """
        if not device.is_accelerator:
            return _timed(work)
        result, device_s, host_s = self.ordered(work, device)
        return result, max(device_s, host_s)

    def ordered(self, work: Callable[[], Result], device: Device) -> tuple[Result, float, float]:
        """Run `work`; return its result, the device seconds, and the host seconds to launch it.

        The host seconds are 0 on a CPU, and if the host had to wait for the device. An accelerator
        gets filler work first, because it is busy in a step too; otherwise it would idle before
        each of the first kernels. On an H200 a step of GPT-2 medium took 0.357 s; the layer times
        measured this way add up to 0.357 s, and to 0.62 s without filler work.
        """
        if not device.is_accelerator:
            return *self.timed(work, device), 0.0
        if self._lead is None or self._lead.device is not device:
            self._lead = _FillerWork(device)
        return self._lead.timed(work)

    def from_idle(self, work: Callable[[], Result], device: Device) -> tuple[Result, float]:
        """Run `work`; return its result and the seconds from an idle device until completion.

        Host and device overlap, as in a step. On a CPU this equals `timed`.
        """
        if not device.is_accelerator:
            return self.timed(work, device)
        device.synchronize()
        began_s = time.perf_counter()
        result = work()
        device.synchronize()
        return result, time.perf_counter() - began_s


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    first, waited_before_s = time.perf_counter(), _waited_s()
    begin = time.perf_counter()
    result = work()
    end = time.perf_counter()
    waited_s = _waited_s() - waited_before_s
    # Some of the wait may be before or after the work: subtract only what must be within it.
    outside_s = (begin - first) + (time.perf_counter() - end)
    return result, end - begin - max(0.0, waited_s - outside_s)


def _waited_s() -> float:
    try:
        return int(_SCHEDULED.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0  # not Linux, or a sandbox


class _FillerWork:
    """Filler work that keeps a device busy while the host launches the timed work after it.

    Allocates 64 MiB on the device.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._filler = device.empty([_FILLER], torch.float32).fill_(0)
        self._wanted_s = _FIRST_LEAD_S
        self._each_s = 0.0
        self._launch_filler(2)  # the first call takes longer, because it loads the kernel
        self._each_s = self._span(lambda: self._launch_filler(_PROBED))[1] / _PROBED

    def timed(self, work: Callable[[], Result]) -> tuple[Result, float, float]:
        """Run `work`; return its result, the device seconds and the host seconds.

        If the device reached `work` before all of it was launched (the host waited for it, or the
        filler was too short), the device seconds include that delay, the host seconds are 0, and
        the next filler is longer.
        """
        self.device.synchronize()
        number = self._wanted_s / self._each_s if self._each_s > 0 else 0
        self._launch_filler(min(_MOST, round(number)))
        result, device_s, host_s, is_ahead = self._measured(work)
        if is_ahead:
            return result, device_s, host_s
        # Longer each time: on a cold device the filler may take less time than the probe did.
        self._wanted_s = _MARGIN * max(self._wanted_s, host_s)
        return result, device_s, 0.0

    def _measured(self, work: Callable[[], Result]) -> tuple[Result, float, float, bool]:
        """Run `work`; return result, device and host seconds, and whether the host ended first."""
        begin, end = self.device.event(timing=True), self.device.event(timing=True)
        begin.record()
        began_s = time.perf_counter()
        result = work()
        host_s = time.perf_counter() - began_s
        is_ahead = not begin.query()
        end.record()
        end.synchronize()
        return result, begin.elapsed_ms(end) / 1e3, host_s, is_ahead

    def _span(self, work: Callable[[], None]) -> tuple[None, float]:
        self.device.synchronize()
        result, device_s, *_ = self._measured(work)
        return result, device_s

    def _launch_filler(self, number: int) -> None:
        for _ in range(number):
            self._filler.add_(1.0)


_FILLER: Final = 2**24  # float32: some 50 us of a fast device, and 5 us of the host
_PROBED: Final = 20
_FIRST_LEAD_S: Final = 2e-3
_MARGIN: Final = 1.5  # multiple of the lead that was too short, or of the host's time
# Few enough not to fill the launch queue (1,024 in CUDA), which would block the host.
_MOST: Final = 256
