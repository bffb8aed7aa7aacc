"""Sends on their way: what starts when, and what they keep alive for how long."""

import threading
import weakref

import pytest
import torch

from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import Payload, TensorLanes
from gpipe_hpc.comm.transport.wire import disassemble
from gpipe_hpc.device.device import HostDevice
from tests.comm.transport.networks import LateDevice, Network


class Sender:
    def __init__(self, device=None, limit_s=5.0):
        self.network = Network(limit_s)
        self.payload = Payload(device or HostDevice())
        self.outbox = Outbox(self.payload)

    def send(self, tensor, *, peer=1, way="prompt", direct=None):
        direct = self.network.lane(peer, direct) if direct else None
        structure, tensors = disassemble(tensor, self.payload.device)
        ways = TensorLanes(self.network.lane(peer, way), direct)
        self.outbox.put(peer, self.payload.send(tensors, structure.metas, ways))

    def take(self, size, *, peer=1, way="prompt"):
        came = torch.empty(size)
        self.network.lane(peer, way).receive(came.view(torch.uint8)).wait()
        return came.tolist()


@pytest.mark.parametrize("device", [HostDevice, LateDevice])
def test_a_send_does_not_wait_until_the_one_before_is_taken(device):
    """One thread waited for each message to be taken: zb_v, hanayo and dualpipe_v hung so."""
    sender = Sender(device())
    sender.send(torch.ones(2), way="first")
    sender.send(torch.full((2,), 2.0), way="second")
    sender.send(torch.full((2,), 3.0), peer=2)
    assert sender.take(2, peer=2) == [3, 3]
    assert sender.take(2, way="second") == [2, 2]
    assert sender.take(2, way="first") == [1, 1]
    sender.outbox.drain()


def test_what_is_put_behind_a_copy_does_not_overtake_it():
    device = LateDevice(torch.int64)
    sender = Sender(device)
    began = threading.Event()
    sender.payload._leaving.put(began.wait)
    sender.send(torch.ones(2))
    sender.send(torch.full((1,), 7))  # of the host, so ready at once
    assert not sender.network.started
    began.set()
    assert sender.take(2) == [1, 1]
    last = torch.empty(1, dtype=torch.int64)
    sender.network.lane(1, "prompt").receive(last).wait()
    assert last.tolist() == [7]


class Memory(bytearray):
    """Of a tensor, to see when nothing uses it any more."""


def test_a_tensor_is_let_go_of_once_its_own_receiver_has_it(until):
    """Behind a message that nobody took yet, those to other ranks were kept."""
    sender = Sender()
    memories = [Memory(8) for _ in range(2)]
    for peer, memory in enumerate(memories):
        sender.send(torch.frombuffer(memory, dtype=torch.float32), peer=peer)
    alive = [weakref.ref(memory) for memory in memories]
    del memory, memories
    sender.take(2, peer=1)
    until(lambda: alive[1]() is None, 5, "the second was let go of")
    assert alive[0]() is not None
    sender.take(2, peer=0)
    until(lambda: alive[0]() is None, 5, "the first was let go of")


def test_pinned_memory_is_not_used_again_before_its_message_has_left():
    sender = Sender(LateDevice())
    sender.send(torch.ones(4))
    sender.send(torch.full((4,), 2.0))
    assert sender.payload.pool.num_made == 2
    assert [sender.take(4), sender.take(4)] == [[1] * 4, [2] * 4]
    sender.outbox.drain()
    sender.send(torch.full((4,), 3.0))
    assert sender.take(4) == [3] * 4
    assert sender.payload.pool.num_made == 2


def test_what_goes_over_the_device_is_awaited_by_nobody_and_kept_until_it_is_done():
    sender = Sender(LateDevice())
    sender.send(torch.ones(2), direct="device")
    assert sender.outbox._lines.num_pending == 0
    assert len(sender.outbox._on_stream) == 1
    sender.network.lane(1, "device").receive(torch.empty(8, dtype=torch.uint8))
    sender.send(torch.ones(2), direct="device")
    assert len(sender.outbox._on_stream) == 1  # the first is done


@pytest.mark.parametrize("device", [HostDevice, LateDevice])
def test_a_send_that_failed_is_told_by_the_next_one_and_at_the_end(device, until):
    sender = Sender(device(), limit_s=0.01)
    sender.send(torch.ones(2))
    until(lambda: sender.outbox._lines.failure is not None, 5, "the send timed out")
    with pytest.raises(RuntimeError, match="timed out"):
        sender.send(torch.ones(2))
    with pytest.raises(RuntimeError, match="timed out"):
        sender.outbox.drain()


@pytest.mark.parametrize("device", [HostDevice, LateDevice])
def test_a_mistake_of_ours_on_a_thread_is_told_too(device, monkeypatch, until):
    """Only RuntimeError was: a thread that ended by another one left its rank waiting."""

    def fail(*_):
        raise ValueError("no such peer")

    sender = Sender(device())
    monkeypatch.setattr("tests.comm.transport.networks.NetworkWork.wait", fail)
    sender.send(torch.ones(2))
    until(lambda: sender.outbox._lines.failure is not None, 5, "the wait failed")
    with pytest.raises(ValueError, match="no such peer"):
        sender.outbox.drain()


def test_an_outbox_that_is_let_go_of_ends_its_threads(until):
    before = set(threading.enumerate())
    sender = Sender(LateDevice())
    sender.send(torch.ones(2))
    sender.take(2)
    sender.outbox.drain()
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    del sender
    until(lambda: not any(thread.is_alive() for thread in own), 5, "its threads ended")
