"""How long work takes on an accelerator, which is played by a list of what its marks tell."""

import torch

from gpipe_hpc.planner.costs import clock as clocks
from gpipe_hpc.planner.costs.clock import WorkClock

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


def ordered(monkeypatch, *works):
    """Return the milliseconds of the device and of the host for each work, one after the other."""
    machine = Machine()
    monkeypatch.setattr(clocks.time, "perf_counter", machine.perf_counter)
    clock = WorkClock()
    found = [clock.ordered(layer(machine, *work), machine) for work in works]
    assert all(result == "made" for result, _, _ in found)
    return [(round(device_s / MS, 6), round(host_s / MS, 6)) for _, device_s, host_s in found]


def test_a_device_does_not_wait_for_the_first_kernels(monkeypatch):
    """Ten kernels of 0.1 ms that the host orders in 0.05 ms each: 1 ms, as within a step."""
    assert ordered(monkeypatch, (10, 0.05 * MS, 0.1 * MS)) == [(1, 0.5)]


def test_the_host_is_timed_beside_the_device(monkeypatch):
    assert ordered(monkeypatch, (10, 0.1 * MS, 0.05 * MS)) == [(0.5, 1)]


def test_the_lead_grows_until_the_host_is_ahead(monkeypatch):
    """4 ms of the host are longer than the first lead, in which half of them hide."""
    work = (10, 0.4 * MS, 0.1 * MS)
    (first, host), *others = ordered(monkeypatch, work, work)
    assert 1 < first < 2.5 and host == 0
    assert others == [(1, 4)]


def test_the_lead_grows_where_the_probe_took_longer(monkeypatch):
    """A cold device took ten times as long: the lead stayed too short, however often it ran."""
    add = Filler.add_

    def cold(filler, value):
        filler.num += 1
        add(filler, value)
        filler.machine.put(450e-6 if filler.num <= 22 else 0.0)

    monkeypatch.setattr(Filler, "add_", cold)
    work = (10, 0.4 * MS, 0.1 * MS)
    assert ordered(monkeypatch, *[work] * 12)[-1] == (1, 4)


def test_a_host_that_waits_for_the_device_does_not_count_the_lead(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(clocks.time, "perf_counter", machine.perf_counter)
    clock = WorkClock()

    def reads():
        machine.put(1 * MS)
        machine.synchronize()  # as `item` does
        machine.put(1 * MS)

    for _ in range(3):
        _, device_s, host_s = clock.ordered(reads, machine)
        assert (round(device_s / MS, 6), host_s) == (2, 0)


def test_a_time_by_itself_is_the_longer_one(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(clocks.time, "perf_counter", machine.perf_counter)
    for work, expected in (((10, 0.05 * MS, 0.1 * MS), 1), ((10, 0.1 * MS, 0.05 * MS), 1)):
        _, seconds = WorkClock().timed(layer(machine, *work), machine)
        assert round(seconds / MS, 6) == expected


def test_from_an_idle_device_until_it_is_done(monkeypatch):
    """What was ahead is not measured; what the device has still to do once it is ordered is."""
    machine = Machine()
    monkeypatch.setattr(clocks.time, "perf_counter", machine.perf_counter)
    machine.put(7.0)
    result, seconds = WorkClock().from_idle(layer(machine, 2, 1.0, 10.0), machine)
    assert (result, seconds) == ("made", 21.0)
    _, seconds = WorkClock().from_idle(layer(machine, 3, 10.0, 1.0), machine)
    assert seconds == 31.0
