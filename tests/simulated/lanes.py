"""Channels between ranks on threads, which simulate the transport of processes.

A channel between hosts simulates Gloo's: it reads the sender's memory when the receiver takes the
message, and waits block the host. A channel of the device simulates NCCL's: it has its own stream,
which starts after the current one, and `wait` makes the current stream wait for it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.transport.device_handoff import DeviceHandoff, hand_off
from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import Payload
from gpipe_hpc.comm.transport.process import ChannelEnd, ProcessTransport
from tests.simulated.device import SimulatedDevice

_LIMIT_S = 20.0


def wait_for(world: Any, come: Callable[[float], bool], what: str) -> None:
    """Return once `come(seconds)` is true; raise if a rank has failed."""
    deadline_s = time.monotonic() + _LIMIT_S
    while not come(0.05):
        has_failed = world.hub.report is not None
        if has_failed or (world.device.is_accelerator and world.device.tracker.faults):
            raise RuntimeError(f"another rank has failed, ahead of {what}")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"nothing came within {_LIMIT_S:g} s: {what}")


class Sent(NamedTuple):
    """A sent message: host memory, or tensors on the sender's stream."""

    tensor: Tensor
    left: DeviceHandoff | None
    is_taken: threading.Event


@dataclass
class Queue:
    """Messages in transit between two ranks; the n-th receive gets the n-th message."""

    world: Any
    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: dict[int, Sent] = field(default_factory=dict)
    num_sent: int = 0
    num_posted: int = 0

    def put(self, sent: Sent) -> None:
        with self.changed:
            self.sent[self.num_sent] = sent
            self.num_sent += 1
            self.changed.notify_all()

    def post(self) -> int:
        """Return the number of the next receive."""
        self.num_posted += 1
        return self.num_posted - 1

    def take(self, number: int) -> Sent:
        with self.changed:
            has_come = partial(self.changed.wait_for, lambda: number in self.sent)
            wait_for(self.world, has_come, "what was to be received")
            return self.sent.pop(number)


class _Receipt(NamedTuple):
    """A send between hosts, complete once the message was received."""

    world: Any
    is_taken: threading.Event

    def wait(self) -> None:
        wait_for(self.world, self.is_taken.wait, "the taking of what was sent")

    def is_completed(self) -> bool:
        return self.is_taken.is_set()


class HostLane:
    """A channel between hosts."""

    def __init__(self, queue: Queue, device: SimulatedDevice) -> None:
        self._queue, self._device = queue, device

    def send(self, tensor: Tensor) -> Any:
        _refuse(self._device, tensor, on_device=False)
        self._device.host_uses("send", tensor, is_write=False)
        sent = Sent(tensor, None, threading.Event())
        self._queue.put(sent)
        return _Receipt(self._queue.world, sent.is_taken)

    def receive(self, tensor: Tensor) -> Any:
        _refuse(self._device, tensor, on_device=False)
        self._device.host_uses("receive", tensor, is_write=True)
        return _HostReceive(self._queue, self._queue.post(), tensor)


class _HostReceive(NamedTuple):
    queue: Queue
    number: int
    tensor: Tensor

    def wait(self) -> None:
        sent = self.queue.take(self.number)
        assert sent.tensor.nbytes == self.tensor.nbytes, "the ends expect other sizes"
        # The bytes as they are now: who wrote to them meanwhile has sent something else.
        ctypes.memmove(self.tensor.data_ptr(), sent.tensor.data_ptr(), self.tensor.nbytes)
        sent.is_taken.set()

    def is_completed(self) -> bool:
        return False


class DeviceLane:
    """A channel of the device's backend; sent tensors must live until it is complete."""

    def __init__(self, queue: Queue, device: SimulatedDevice) -> None:
        self._queue, self._device, self._stream = queue, device, device.stream()

    def send(self, tensor: Tensor) -> Any:
        _refuse(self._device, tensor, on_device=True)
        self._stream.wait_stream(self._device.current_stream())
        with self._device.on(self._stream):
            left = hand_off(self._device, [tensor.clone()])
        self._queue.put(Sent(tensor, left, threading.Event()))
        return _OnStream(self._device, left.ready)

    def receive(self, tensor: Tensor) -> Any:
        _refuse(self._device, tensor, on_device=True)
        posted = self._device.current_stream().record_event()
        return _DeviceReceive(
            self._device, self._stream, self._queue, self._queue.post(), tensor, posted
        )


class _OnStream(NamedTuple):
    device: SimulatedDevice
    done: Any

    def wait(self) -> None:
        self.device.current_stream().wait_event(self.done)

    def is_completed(self) -> bool:
        return bool(self.done.query())


class _DeviceReceive(NamedTuple):
    device: SimulatedDevice
    stream: Any
    queue: Queue
    number: int
    tensor: Tensor
    posted: Any

    def wait(self) -> None:
        sent = self.queue.take(self.number)
        assert sent.left is not None
        self.stream.wait_event(self.posted)
        with self.device.on(self.stream):
            self.stream.wait_event(sent.left.ready)
            self.device.keep_for_stream(sent.left.tensors[0], self.stream)
            self.tensor.copy_(sent.left.tensors[0])
            done = self.stream.record_event()
        self.device.current_stream().wait_event(done)

    def is_completed(self) -> bool:
        return False


def _refuse(device: SimulatedDevice, tensor: Tensor, *, on_device: bool) -> None:
    if device.holds(tensor) is not on_device:
        device.tracker.misplaced("a lane", "expected a tensor of the other kind of memory")


def open_transport(world: Any, channels: Sequence[PlacedChannel], way: str) -> ProcessTransport:
    """Open the transport of processes over channels of threads, `direct` or `staged`."""
    device, queues = world.device, world.hub.__dict__.setdefault("played_lanes", {})

    def queue(*name: Any) -> Queue:
        with world.hub.changed:
            return queues.setdefault(name, Queue(world))

    links, lanes = [], {}
    for channel in channels:
        ends = channel.source_rank, channel.destination_rank
        if world.rank not in ends:
            continue
        peer = ends[1] if world.rank == ends[0] else ends[0]
        if way == "direct" and ends not in lanes:
            lanes[ends] = DeviceLane(queue("direct", ends), device)
        host = [HostLane(queue(kind, ends, channel.tag), device) for kind in ("prompt", "late")]
        links.append(ChannelEnd(channel, peer, host[0], host[1], lanes.get(ends)))
    payload = Payload(device)
    return ProcessTransport(links, payload, Outbox(payload))
