"""Simulation of MPI between ranks on threads, below the torch group that is built on it.

A message may be read or written at any time between start and end, so accesses are checked at both:
sent memory at the start, received memory at start and end. MPI uses device memory without a stream;
memory that the host has not waited for is an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, ReduceOp

from gpipe_hpc.comm.transport.base import PlacedChannel
from gpipe_hpc.comm.transport.lanes import TorchLane
from gpipe_hpc.comm.transport.outbox import Outbox
from gpipe_hpc.comm.transport.payload import Payload
from gpipe_hpc.comm.transport.process import ChannelEnd, ProcessTransport
from gpipe_hpc.comm.world.mpi.library import Tags
from gpipe_hpc.comm.world.mpi.process_group import MpiGroup
from tests.simulated.lanes import Queue, Sent, wait_for

_LATE_TAG, _DEVICE_TAG = 2**28, 2**30
_LIMIT_S = 20.0


class SimulatedMessage:
    """A send or receive, complete once `finish` is called by the first thread that waits."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish, self._lock, self.is_done = finish, threading.Lock(), False

    def wait(self, limit_s: float) -> None:
        with self._lock:
            if not self.is_done:
                self._finish()
                self.is_done = True


class SimulatedLibrary:
    """The MPI library of one rank; `world` has its device and the hub shared by all ranks."""

    def __init__(self, world: Any, *, takes_device_pointers: bool) -> None:
        self.world, self.takes_device_pointers = world, takes_device_pointers
        self.tags, self.num_groups = Tags(2**28), 1

    def send(self, tensor: Tensor, rank: int, tag: int) -> SimulatedMessage:
        device = self.world.device
        assert self._is_apart(tensor) <= self.takes_device_pointers, "memory that MPI cannot read"
        is_taken = threading.Event()
        if self._is_apart(tensor):
            with device.on(device.stream()):  # which stands behind nothing but what the host knows
                bytes_ = tensor.to("cpu")
        else:
            self._host_uses("send", tensor, is_write=False)
            bytes_ = tensor
        self._queue(self.world.rank, rank, tag).put(Sent(bytes_, None, is_taken))

        def finish() -> None:
            wait_for(self.world, is_taken.wait, "the taking of a message")

        return SimulatedMessage(finish)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> SimulatedMessage:
        queue = self._queue(rank, self.world.rank, tag)
        assert self._is_apart(tensor) <= self.takes_device_pointers, "memory that MPI cannot write"
        self._write(tensor, None)
        number = queue.post()

        def finish() -> None:
            sent = queue.take(number)
            self._write(tensor, sent.tensor)
            sent.is_taken.set()

        return SimulatedMessage(finish)

    def _write(self, tensor: Tensor, given: Tensor | None) -> None:
        device = self.world.device
        if not self._is_apart(tensor):
            self._host_uses("receive", tensor, is_write=True)
            if given is not None:
                assert given.nbytes == tensor.nbytes, "the ends expect other sizes"
                ctypes.memmove(tensor.data_ptr(), given.data_ptr(), tensor.nbytes)
            return
        stream = device.stream()
        with device.on(stream):
            if given is None:
                tensor.zero_()
            else:
                tensor.copy_(given.view(tensor.dtype).view_as(tensor))
        stream.synchronize()

    def _host_uses(self, what: str, tensor: Tensor, *, is_write: bool) -> None:
        if self.world.device.is_accelerator:
            self.world.device.host_uses(what, tensor, is_write=is_write)

    def _is_apart(self, tensor: Tensor) -> bool:
        device = self.world.device
        return bool(device.is_accelerator and device.holds(tensor))

    def _queue(self, *name: Any) -> Queue:
        with self.world.hub.changed:
            queues: dict[Any, Queue] = self.world.hub.__dict__.setdefault("played_mpi", {})
            return queues.setdefault(name, Queue(self.world))


def group_of(library: Any, ranks: Sequence[int], name: str = "all", **settings: Any) -> MpiGroup:
    """Return the group object of a rank."""
    world = library.world
    with world.hub.changed:
        store = world.hub.__dict__.setdefault("played_store", HashStore())
    options = SimpleNamespace(
        group_rank=list(ranks).index(world.rank),
        group_size=len(ranks),
        timeout=timedelta(seconds=_LIMIT_S),
        global_ranks_in_group=list(ranks),
        group_id=name,
        store=PrefixStore(f"{name}{tuple(ranks)}", store),
    )
    return MpiGroup(library, options, world.device, **settings)


def open_mpi_transport(
    world: Any, channels: Sequence[PlacedChannel], *, takes_device_pointers: bool
) -> ProcessTransport:
    """Open the transport of processes over MPI groups, as `ProcessWorld` does."""
    library = SimulatedLibrary(world, takes_device_pointers=takes_device_pointers)
    own = [c for c in channels if world.rank in (c.source_rank, c.destination_rank)]
    ends = {tuple(sorted((c.source_rank, c.destination_rank))) for c in own}
    # Blocks of two numbers: most messages are several.
    groups = {pair: group_of(library, pair, block_bytes=8) for pair in sorted(ends)}
    links = []
    for channel in own:
        pair = tuple(sorted((channel.source_rank, channel.destination_rank)))
        (peer,) = set(pair) - {world.rank}
        lane = partial(TorchLane, groups[pair], pair.index(peer))
        host = lane(channel.tag), lane(_LATE_TAG + channel.tag)
        links.append(ChannelEnd(channel, peer, *host, lane(_DEVICE_TAG + channel.tag)))
    payload = Payload(world.device)
    return ProcessTransport(links, payload, Outbox(payload))


def reduce_all(world: Any) -> list[Tensor]:
    """All-reduce, gather and send tensors just computed on a second stream."""
    found: list[Tensor] = []
    for takes_device_pointers in (False, True):
        device = world.device
        library = SimulatedLibrary(world, takes_device_pointers=takes_device_pointers)
        name = f"sums {takes_device_pointers}"
        group = group_of(library, range(world.size), name, block_bytes=8)
        with device.on(device.stream()):
            own = torch.arange(7.0, device=device.torch).mul_(world.rank + 1)
            total = own * 2
            work = group.allreduce([total], SimpleNamespace(reduceOp=ReduceOp.SUM))
            work.wait()
            found.append(total + 1)
            told = own * 3
            work = group.allreduce([told], SimpleNamespace(reduceOp=ReduceOp.SUM))
            work.get_future().wait()
            work.wait()
            found.append(told + 1)
        # Another group has a thread of its own, which has not made the device its own before.
        group = group_of(library, range(world.size), f"gathers {takes_device_pointers}")
        with device.on(device.stream()):
            mine = torch.arange(5.0, device=device.torch).mul_(world.rank + 1)
            parts = [torch.empty(5, device=device.torch) for _ in range(world.size)]
            # The thread of a group of its own has not made the device its own for another job.
            gathers = group_of(library, range(world.size), f"gathers {name}", block_bytes=8)
            gathers.allgather([parts], [mine]).wait()
            found.append(torch.cat(parts) + 1)
            turned = torch.arange(6.0, device=device.torch).mul_(world.rank + 1).view(2, 3).t()
            group.broadcast([turned], SimpleNamespace(rootRank=1)).wait()
            found.append(turned * 2)
    return found
