"""Channels in shared memory between processes of one host, for tensors in host memory.

The sender copies a boundary once into a slot of shared memory, where the receiver's stage uses it.
An announcement of fixed size is sent over a Unix socket: it wakes the receiver and keeps the order
of the channel, and its end of file shows at once that the other process has died. The receiver
releases slots through shared memory.

A socket buffers some hundred announcements. Further messages wait in the sender: a send never
blocks, and a rank that waits for a message sends its own waiting messages meanwhile.
"""

import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.shared_channel import SharedReceiver, SharedSender, receive_exactly
from gpipe_hpc.comm.transport.slots import Slot
from gpipe_hpc.pytree import Nest

_HELLO: Final = struct.Struct("=3q")
_LOOK_AGAIN_S: Final = 0.001
_MAX_FOLDER_LENGTH: Final = 80  # of 108 that the address of a Unix socket may have


class SharedTransport:
    """Transport in shared memory between processes of one host."""

    def __init__(
        self, senders: Sequence[SharedSender], receivers: Sequence[SharedReceiver]
    ) -> None:
        self._senders = {sender.channel: sender for sender in senders}
        self._receivers = {receiver.channel: receiver for receiver in receivers}
        self._behind: list[SharedSender] = []  # with messages that have not left

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Copy into shared memory and announce the message; queue it while the socket is full."""
        sender = self._senders[channel]
        sender.send(microbatch, nest, num_samples)
        if sender.num_waiting and sender not in self._behind:
            self._behind.append(sender)

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Do nothing: the sender provides the memory."""

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Return the next message of the channel, whose tensors are in shared memory."""
        receiver = self._receivers[channel]
        if self._behind:
            self._send_until(receiver.connection)
        return receiver.receive(microbatch)

    def finish(self) -> None:
        """Block until all messages are announced."""
        self._send_until(None)

    def close(self) -> None:
        """Close every connection; a wait on one, in either process, fails at once."""
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()

    def drop(self) -> None:
        """Close only this process's descriptors, for those copied by a fork."""
        for sender in self._senders.values():
            sender.drop()
        for receiver in self._receivers.values():
            receiver.drop()

    def _send_until(self, arriving: socket.socket | None) -> None:
        """Send waiting messages until none is left, or until `arriving` has data."""
        num_left, since = -1, 0.0
        while waiting := [sender for sender in self._behind if not sender.flush()]:
            self._behind = waiting
            now, count = time.monotonic(), sum(sender.num_waiting for sender in waiting)
            if count != num_left:
                num_left, since = count, now
            limit_s = waiting[0].connection.gettimeout() or 0.0
            if now > since + limit_s:
                rank = waiting[0].channel.destination_rank
                raise TimeoutError(f"timed out waiting for rank {rank} to take what it was sent")
            ready = select.poll()
            for sender in waiting:
                ready.register(sender.connection, select.POLLOUT)
            if arriving is not None:
                ready.register(arriving, select.POLLIN)
            happened = ready.poll(1e3 * limit_s)
            if arriving is not None and arriving.fileno() in dict(happened):
                return
            time.sleep(_LOOK_AGAIN_S)  # room in the socket is no room for a descriptor
        self._behind = []


def why_not_shared() -> str:
    """Return why this process cannot share memory with others of its host; empty if it can.

    A container may forbid the necessary calls (memfd_create, passing a descriptor, named sockets),
    so each is tried once.
    """
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        folder = _private_folder()
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "s"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _, descriptor = Slot.create(0, 1)
        try:
            _pass_on(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _pass_on(descriptor: int) -> None:
    """Send a slot's descriptor to this process and map it, as a test."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        socket.send_fds(one, [b"x"], [descriptor])
        _, arrived, _, _ = socket.recv_fds(other, 1, 1)
        if not arrived:
            raise OSError("a descriptor that was passed on did not arrive")
        Slot.attach(0, arrived[0])


Exchange = Callable[[str, Collection[int]], Mapping[int, str]]
"""Publishes a text for some ranks, which do the same; returns theirs by rank."""


def open_shared_transport(
    channels: Sequence[PlacedChannel], rank: int, exchange: Exchange, timeout_s: float
) -> SharedTransport:
    """Connect this rank's channels to ranks of its host, which must call this as well."""
    folder = _private_folder()
    outgoing = [c for c in channels if c.source_rank == rank]
    incoming = [c for c in channels if c.destination_rank == rank]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            listener.listen(len(incoming) + 1)
            listener.settimeout(timeout_s)
            peers = {c.destination_rank for c in outgoing} | {c.source_rank for c in incoming}
            addresses = exchange(str(folder / "s"), peers)
            # A listener takes calls before it looks at them, so all may call first. Who calls this
            # one has done so when all are accepted: nobody needs the folder then.
            senders = [_connect(c, addresses[c.destination_rank], timeout_s) for c in outgoing]
            receivers = _accept(incoming, listener, timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return SharedTransport(senders, receivers)


def meeting_place() -> Path:
    """Return the folder for the sockets of a host's ranks; short enough for a socket's address."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= _MAX_FOLDER_LENGTH else "/tmp")


def _private_folder() -> Path:
    """Create a folder that only this user can access."""
    return Path(tempfile.mkdtemp(prefix="gpipe_hpc_", dir=meeting_place()))


def _connect(channel: PlacedChannel, address: str, timeout_s: float) -> SharedSender:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    connection.connect(address)
    connection.sendall(_HELLO.pack(channel.source_rank, channel.destination_rank, channel.tag))
    return SharedSender(channel, connection)


def _accept(
    channels: Sequence[PlacedChannel], listener: socket.socket, timeout_s: float
) -> list[SharedReceiver]:
    by_hello = {(c.source_rank, c.destination_rank, c.tag): c for c in channels}
    receivers = []
    for _ in channels:
        connection, _ = listener.accept()
        connection.settimeout(timeout_s)
        hello = _HELLO.unpack(receive_exactly(connection, _HELLO.size))
        receivers.append(SharedReceiver(by_hello[hello[0], hello[1], hello[2]], connection))
    return receivers
