"""Boundaries through pinned memory, on a device that is played: each wait is there, and needed."""

from collections import deque

import pytest
import torch

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import Payload
from gpipe_hpc.comm.transport.process import ChannelEnd, ProcessTransport
from gpipe_hpc.schedule import Channel
from tests.comm.transport.networks import Network
from tests.simulated.device import SimulatedDevice
from tests.simulated.errors import SimulationError
from tests.simulated.interpose import interposed
from tests.simulated.tracker import Tracker

CHANNEL = PlacedChannel(Channel(0, 1, 0), source_rank=0, destination_rank=1, tag=0)
NUM_STEPS = 6
# The next send tells what a thread that sends was refused; who receives before waits in vain.
GAVE_UP = (SimulationError, RuntimeError, AssertionError, TimeoutError, ConnectionError)


class Queue:
    """A queue as NCCL has it: on a stream of its own at each end, ordered behind what calls it."""

    def __init__(self, device):
        self.device = device
        self.sends, self.receives = device.stream(), device.stream()
        self.posted = deque()

    def receive(self, tensor):
        self.receives.wait_stream(self.device.current_stream())
        self.posted.append((tensor, Moved(self.device)))
        return self.posted[-1][1]

    def send(self, tensor):
        self.sends.wait_stream(self.device.current_stream())
        into, came = self.posted.popleft()  # here what comes has been posted before
        with self.device.on(self.sends):
            moved = tensor.clone()
        left = Moved(self.device, self.sends.record_event())
        self.receives.wait_event(left.mark)
        with self.device.on(self.receives):
            into.copy_(moved)
        came.mark = self.receives.record_event()
        left.kept = came.kept = moved
        return left


class Moved:
    def __init__(self, device, mark=None):
        self.device, self.mark = device, mark

    def wait(self):
        self.device.current_stream().wait_event(self.mark)

    def is_completed(self):
        return self.mark.query()


def two_ends(device, *, has_backend=False):
    """Return the transports of two ranks, which a thread plays in turn."""
    network = Network(limit_s=2.0)
    lanes = [network.lane("prompt"), network.lane("late")]
    if has_backend:
        lanes.append(Queue(device))
    payloads = [Payload(device) for _ in range(2)]
    return [
        ProcessTransport([ChannelEnd(CHANNEL, 1 - rank, *lanes)], payload, Outbox(payload))
        for rank, payload in enumerate(payloads)
    ]


def carry(device, *, has_backend=False):
    """Send what is made and use what comes, again and again; return the sums."""
    source, destination = two_ends(device, has_backend=has_backend)
    arrived = []
    for step in range(NUM_STEPS):
        shape = (4, 3) if step != 3 else (5,)  # another one than was posted
        for microbatch in range(2):
            destination.post(CHANNEL, "training", microbatch)
            made = torch.ones(shape, device=device.torch) * step
            nest = (made.t(), torch.full((2,), step))
            source.send(CHANNEL, "training", microbatch, nest, 1)
            del made, nest
            torch.zeros(shape, device=device.torch).add_(1)  # may be given the memory of the last
        for microbatch in range(2):
            came, on_host = destination.wait(CHANNEL, "training", microbatch).nest
            assert not device.holds(on_host) and on_host.tolist() == [step] * 2
            assert device.holds(came)
            arrived.append((came * 2).sum())
            del came  # the next one may be given its memory
        source.finish()
        destination.finish()
    return [float(each) for each in arrived]


def on_played(ignores=frozenset(), **settings):
    """Return what is carried, the faults, and where the transport waits and lends."""
    with interposed():
        device = SimulatedDevice(Tracker(), ignores)
        with device.playing(), device.in_use():
            try:
                sums = carry(device, **settings)
            except GAVE_UP:
                sums = None
        return sums, device.tracker.faults, device.sites


@pytest.mark.parametrize("has_backend", [False, True])
def test_nothing_is_used_before_it_is_there_or_given_back_before_it_was_used(has_backend):
    sums, faults, _ = on_played(has_backend=has_backend)
    assert not faults
    once = [2 * step * (12 if step != 3 else 5) for step in range(NUM_STEPS)]
    assert sums == [each for each in once for _ in range(2)]


def own_sites():
    sites = on_played()[2]
    return sorted({site for site in sites if "comm/transport" in str(site[1])}, key=str)


def test_each_wait_event_and_loan_is_missed_where_it_does_nothing():
    sites = own_sites()
    assert len(sites) >= 7
    unnoticed = [site for site in sites if not on_played(frozenset({site}))[1]]
    assert not unnoticed


def test_the_host_waits_for_its_own_copies_alone():
    """Not for the compute: the thread that computes goes on."""
    with interposed():
        device = SimulatedDevice(Tracker())
        with device.playing(), device.in_use():
            source, destination = two_ends(device)
            for step in range(3):
                destination.post(CHANNEL, "training", 0)
                source.send(CHANNEL, "training", 0, torch.ones(3, device=device.torch) * step, 1)
                came = destination.wait(CHANNEL, "training", 0).nest
            source.finish()
        waits = {str(wait) for wait in device.host_waits}
        assert came.shape == (3,)
    assert waits and all("outbox.py" in wait for wait in waits)
