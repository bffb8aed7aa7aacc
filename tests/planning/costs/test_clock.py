"""How long work takes on an accelerator, which is played by a list of what its marks tell."""

import torch

from gpipe_hpc.planning.costs import clock as clocks
from gpipe_hpc.planning.costs.clock import Clock

MS = 1e-3


class Machine:
    """A device that works off its list, and the host beside it; seconds pass as they are told."""

    torch = torch.device("cpu")
    is_accelerator = True

    def __init__(self):
        self.host_s = self.device_s = 0.0

    def host(self, seconds):
        self.host_s += seconds

    def put(self, seconds):
        """Order work: it begins once it is ordered and what is ahead of it is done."""
        self.device_s = max(self.device_s, self.host_s) + seconds

    def perf_counter(self):
        return self.host_s

    def empty(self, shape, dtype):
        return Filler(self)

    def synchronize(self):
        self.host_s = max(self.host_s, self.device_s)

    def event(self, *, timing=False):
        return Mark(self)


class Filler:
    """Each addition takes 50 us of the device and 5 of the host."""

    def __init__(self, machine):
        self.machine, self.num = machine, 0

    def fill_(self, value):
        return self

    def add_(self, value):
        self.machine.host(5e-6)
        self.machine.put(50e-6)


class Mark:
    def __init__(self, machine):
        self.machine = machine

    def record(self, stream=None):
        self.machine.put(0.0)
        self.at_s = self.machine.device_s

    def query(self):
        return self.at_s <= self.machine.host_s

    def synchronize(self):
        self.machine.host_s = max(self.machine.host_s, self.at_s)

    def elapsed_ms(self, later):
        return 1e3 * (later.at_s - self.at_s)


def layer(machine, kernels, host_s, device_s):
    """Order so many kernels, each of which the host needs some time for."""

    def work():
        for _ in range(kernels):
            machine.host(host_s)
            machine.put(device_s)
        return "made"

    return work


def timed(monkeypatch, *works):
    machine = Machine()
    monkeypatch.setattr(clocks.time, "perf_counter", machine.perf_counter)
    clock = Clock()
    found = [clock.timed(layer(machine, *work), machine) for work in works]
    assert all(result == "made" for result, _ in found)
    return [seconds for _, seconds in found]


def test_a_device_does_not_wait_for_the_first_kernels(monkeypatch):
    """Ten kernels of 0.1 ms that the host orders in 0.05 ms each: 1 ms, as within a step."""
    (seconds,) = timed(monkeypatch, (10, 0.05 * MS, 0.1 * MS))
    assert abs(seconds - 1 * MS) < 1e-9


def test_where_the_host_takes_longer_it_counts(monkeypatch):
    (seconds,) = timed(monkeypatch, (10, 0.1 * MS, 0.05 * MS))
    assert abs(seconds - 1 * MS) < 1e-9


def test_the_lead_grows_until_the_host_is_ahead(monkeypatch):
    """4 ms of the host are longer than the first lead, in which half of them hide."""
    work = (10, 0.4 * MS, 0.1 * MS)
    first, second = timed(monkeypatch, work, work)
    assert first < 2.5 * MS
    assert abs(second - 4 * MS) < 1e-9


def test_a_host_that_waits_for_the_device_does_not_count_the_lead(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(clocks.time, "perf_counter", machine.perf_counter)
    clock = Clock()

    def reads():
        machine.put(1 * MS)
        machine.synchronize()  # as `item` does
        machine.put(1 * MS)

    for _ in range(3):
        assert abs(clock.timed(reads, machine)[1] - 2 * MS) < 1e-9
