"""Blocks through pinned memory: the order of copies, and the events that the host waits for.

tests/simulated refuses accesses that no wait orders. An unnecessary wait or a late copy gives the
same numbers there, so here the device records its calls in order.
"""

from contextlib import contextmanager

import pytest
import torch

from gpipe_hpc.comm.world.mpi.staging import HostStaging
from gpipe_hpc.device.device import HostDevice

BLOCK = 4  # elements
NUM_BLOCKS = 5


class Telling(HostDevice):
    """Does all at once, and writes down copies, jobs and waits as pairs: what, and its block."""

    def __init__(self):
        self.told, self.current = [], Stream(self, None)
        self.streams_of = {"fetch": set(), "bring": set()}

    def stream(self):
        return Stream(self, None)

    def current_stream(self):
        return self.current

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy_to_host(self, pinned, tensor):
        self._copies("fetch", tensor)
        super().copy_to_host(pinned, tensor)

    def copy_to_device(self, own, host):
        self._copies("bring", own)
        super().copy_to_device(own, host)

    def _copies(self, what, block):
        self.current.last = what, block.storage_offset() // BLOCK
        self.told.append(self.current.last)
        self.streams_of[what].add(self.current)


class Stream:
    def __init__(self, device, last):
        self.device, self.last = device, last

    def record_event(self):
        return Mark(self.device, self.last)

    def wait_event(self, mark):
        if mark.copy is not None:
            self.device.told.append(("a stream waits for", mark.copy))


class Mark:
    """A mark behind a copy; None: behind nothing."""

    def __init__(self, device, copy):
        self.device, self.copy = device, copy

    def synchronize(self):
        self.device.told.append(("the host waits for", self.copy))

    def query(self):
        return True


def told(*, reads, writes):
    """Return what a device was told in order as each element is doubled on the host."""
    device = Telling()
    stager = HostStaging(device, block_bytes=BLOCK * 4)
    tensor = torch.arange(float(BLOCK * NUM_BLOCKS))
    seen = []

    def job(block):
        number = len(seen)
        device.told.append(("job", number))
        seen.append(block.clone())
        block.copy_(torch.arange(BLOCK) + BLOCK * number).mul_(2)

    stager.through(tensor, stager.begin(), job, reads=reads, writes=writes)
    if reads:
        assert torch.equal(torch.cat(seen), torch.arange(float(BLOCK * NUM_BLOCKS)))
    factor = 2 if writes else 1
    assert torch.equal(tensor, torch.arange(float(BLOCK * NUM_BLOCKS)) * factor)
    if reads and writes:
        assert not device.streams_of["fetch"] & device.streams_of["bring"]
    return device.told


@pytest.mark.parametrize("writes", [False, True])
def test_the_next_block_is_on_its_way_while_one_is_worked_on(writes):
    order = told(reads=True, writes=writes)
    for number in range(NUM_BLOCKS - 1):
        assert order.index(("fetch", number + 1)) < order.index(("job", number))


@pytest.mark.parametrize("writes", [False, True])
def test_a_job_waits_for_the_copy_of_its_own_block_alone(writes):
    order = told(reads=True, writes=writes)
    waits = [each for each in order if each[0] in ("the host waits for", "job")]
    expected = [
        (("the host waits for", ("fetch", number)), ("job", number)) for number in range(NUM_BLOCKS)
    ]
    assert waits == [each for pair in expected for each in pair]


def test_a_block_goes_back_beside_the_next_job():
    """Who takes its buffer next waits for it on a stream, and not the host."""
    order = told(reads=True, writes=True)
    for number in range(NUM_BLOCKS - 1):
        assert order.index(("bring", number)) < order.index(("job", number + 1))
    for number in range(NUM_BLOCKS - 2):
        behind = order.index(("a stream waits for", ("bring", number)))
        assert behind == order.index(("fetch", number + 2)) - 1


def test_what_is_only_written_waits_for_the_block_before_the_last():
    """Two buffers take turns: the next one is free while one is copied to the device."""
    order = told(reads=False, writes=True)
    expected = []
    for number in range(NUM_BLOCKS):
        if number >= 2:
            expected.append(("the host waits for", ("bring", number - 2)))
        expected += [("job", number), ("bring", number)]
    assert order == expected
