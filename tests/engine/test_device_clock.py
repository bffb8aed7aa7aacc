"""Conversion of events of a device to times of the host's clock."""

import struct

import pytest

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.recorder import DeviceClock, StepMarks
from gpipe_hpc.schedule import Action, Op


class AsynchronousDevice(HostDevice):
    """A device that works asynchronously, and whose clock runs too fast by the factor 1 + `drift`.

    `host_s` is the time of the host's clock, `work_until_s` the time on it at which the device will
    have done its work.
    """

    is_accelerator = True

    def __init__(self, drift=0.0):
        self.host_s = 1000.0
        self.work_until_s = 0.0
        self.drift = drift
        self.num_waits = 0

    def event(self, *, timing=False):
        return SimulatedEvent(self)

    def synchronize(self):
        self.num_waits += 1
        self.host_s = max(self.host_s, self.work_until_s)

    def add_work(self, seconds):
        """Add work of some seconds to the device's queue."""
        self.work_until_s = max(self.host_s, self.work_until_s) + seconds

    def now(self):
        return self.host_s


class SimulatedEvent:
    def __init__(self, device):
        self._device = device
        self.reached_s = 0.0

    def record(self, stream=None):
        self.reached_s = max(self._device.host_s, self._device.work_until_s)

    def query(self):
        return self._device.host_s >= self.reached_s

    def synchronize(self):
        self._device.num_waits += 1
        self._device.host_s = max(self._device.host_s, self.reached_s)

    def elapsed_ms(self, later):
        exact = 1e3 * (later.reached_s - self.reached_s) * (1 + self._device.drift)
        return struct.unpack("f", struct.pack("f", exact))[0]  # as CUDA returns it


def test_event_has_the_time_at_which_the_device_reached_it():
    """Regression: it was the time of its recording on the host, so queued work shifted ranks."""
    device = AsynchronousDevice()
    clock = DeviceClock(device, device.now)
    device.add_work(7.0)
    device.host_s += 0.5
    step = StepMarks(clock.mark, clock.begin())
    start = clock.mark()
    device.add_work(2.0)
    step.add(Action(Op.F, 0, 0), start)
    moments = step.moments
    assert list(moments.seconds) == pytest.approx([1007.0, 1009.0], abs=1e-6)
    assert device.num_waits == 3  # once at the start, and for the two events that were read


@pytest.mark.parametrize("drift", [2e-5, -2e-5])
def test_event_times_stay_accurate_over_days(drift):
    """Elapsed times are float32 numbers, and the clocks of host and device drift apart."""
    device = AsynchronousDevice(drift)
    clock = DeviceClock(device, device.now)
    for number in range(20_000):
        begin = clock.begin()
        clock.mark()
        device.add_work(10.0)
        device.host_s += 9.0  # the host runs ahead of the device
        if number % 1000 == 999:
            device.synchronize()  # as for a checkpoint
        elif device.work_until_s - device.host_s > 30:
            device.host_s = device.work_until_s - 15
    before = device.num_waits
    device.host_s = max(device.host_s, begin.mark.reached_s)
    assert begin.seconds() == pytest.approx(begin.mark.reached_s, abs=0.3)
    assert device.num_waits == before


def test_unread_steps_are_discarded():
    device = AsynchronousDevice()
    clock = DeviceClock(device, device.now)
    begins = []
    for _ in range(50):
        begins.append(clock.begin())
        device.add_work(1.0)
        device.host_s += 1.0
        device.add_work(1e-3)  # the device always has work left
    assert sum(begin._before is not None for begin in begins) <= 2
    assert len(clock._steps) <= 3
