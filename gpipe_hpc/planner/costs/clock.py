"""The seconds that work takes, without those in which another process had the core."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import torch

from gpipe_hpc.device.device import Device

Result = TypeVar("Result")

# Of Linux, for the thread that reads it: nanoseconds on a core, nanoseconds ready to run but
# without a core, and how often it got one (Documentation/scheduler/sched-stats.rst).
_SCHEDULED: Final = Path("/proc/thread-self/schedstat")


class Clock:
    """What the time is, and how long work takes. Tests have another one."""

    def __init__(self) -> None:
        self._lead: _Lead | None = None

    def now(self) -> float:
        """Return seconds since some time."""
        return time.monotonic()

    def timed(self, work: Callable[[], Result], device: Device) -> tuple[Result, float]:
        """Run `work` and return its result and the seconds that it takes.

        On CPUs the time in which this thread waited for a core is left out where the system tells
        it: a long layer never runs undisturbed on a busy machine, however often it is repeated,
        while a short one does. What other threads of a parallel layer waited is not known.

        On an accelerator: of its own work or of the host in ordering that, what takes longer.
        """
        if not device.is_accelerator:
            return _timed(work)
        result, device_s, host_s = self.ordered(work, device)
        return result, max(device_s, host_s)

    def ordered(self, work: Callable[[], Result], device: Device) -> tuple[Result, float, float]:
        """Run `work` and return its result, the seconds of the device, and those of the host.

        The host's are those in which it ordered the work; 0 on a CPU, and where it had to wait for
        the device meanwhile.

        An accelerator is kept busy ahead of `work`, as it is in a step: else it would wait for each
        of its first kernels. On an H200 a step of GPT-2 medium took 0.357 s. The seconds of its
        layers, taken so, add up to 0.357 s; without work ahead of them they came to 0.62 s.
        """
        if not device.is_accelerator:
            return *self.timed(work, device), 0.0
        if self._lead is None or self._lead.device is not device:
            self._lead = _Lead(device)
        return self._lead.timed(work)

    def from_idle(self, work: Callable[[], Result], device: Device) -> tuple[Result, float]:
        """Run `work` and return its result, and the seconds until an idle device has done it.

        So host and device work beside each other, as in a step. On a CPU it is as `timed`.
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
    # A wait may have come ahead of the work, or behind it: what is left out came surely within.
    outside_s = (begin - first) + (time.perf_counter() - end)
    return result, end - begin - max(0.0, waited_s - outside_s)


def _waited_s() -> float:
    try:
        return int(_SCHEDULED.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0  # another system, or a sandbox


class _Lead:
    """Work that a device has in hand while the host orders what is timed behind it.

    It takes 64 MiB of the device while its clock is there.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._filler = device.empty([_FILLER], torch.float32).fill_(0)
        self._wanted_s = _FIRST_LEAD_S
        self._each_s = 0.0
        self._put(2)  # the first takes longer, as its kernel is loaded
        self._each_s = self._span(lambda: self._put(_PROBED))[1] / _PROBED

    def timed(self, work: Callable[[], Result]) -> tuple[Result, float, float]:
        """Run `work`; return its result, the seconds of the device and those of the host.

        Where the device came to `work` before all of it was ordered, as the host waited for it or
        the lead was too short, the device's seconds have that in them, and the host's are 0; the
        next lead is longer.
        """
        self.device.synchronize()
        number = self._wanted_s / self._each_s if self._each_s > 0 else 0
        self._put(min(_MOST, round(number)))
        result, device_s, host_s, is_ahead = self._measured(work)
        if is_ahead:
            return result, device_s, host_s
        # More of it each time: what is put ahead may take less than the probe, on a cold device.
        self._wanted_s = _MARGIN * max(self._wanted_s, host_s)
        return result, device_s, 0.0

    def _measured(self, work: Callable[[], Result]) -> tuple[Result, float, float, bool]:
        """Return also whether the device had not begun when the host was done."""
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

    def _put(self, number: int) -> None:
        for _ in range(number):
            self._filler.add_(1.0)


_FILLER: Final = 2**24  # float32: some 50 us of a fast device, and 5 us of the host
_PROBED: Final = 20
_FIRST_LEAD_S: Final = 2e-3
_MARGIN: Final = 1.5  # times the lead that was too short, or what the host took
# So few that their launches do not fill the queue, which would let the host wait: CUDA takes 1,024.
_MOST: Final = 256
