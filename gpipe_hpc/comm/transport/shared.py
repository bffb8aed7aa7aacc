"""Channels in shared memory between processes of one host, for tensors in host memory.

The sender copies a boundary's tensors once into a slot of shared memory, where the receiver's stage
uses them. An announcement of fixed size is sent over a Unix socket: it wakes the receiver and keeps
the order of the channel, and the socket's end of file shows at once that the other process has
died. The receiver releases slots through shared memory.

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
_MAX_FOLDER_LENGTH: Final = 80  # the address of a Unix socket may have 108 bytes


class SharedTransport:
    """Transport in shared memory between processes of one host."""

    def __init__(
        self, senders: Sequence[SharedSender], receivers: Sequence[SharedReceiver]
    ) -> None:
        self._senders = {sender.channel: sender for sender in senders}
        self._receivers = {receiver.channel: receiver for receiver in receivers}
        self._behind: list[SharedSender] = []  # senders with messages that are not announced yet

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Copy tensors into shared memory and announce the message, or queue it if that blocks."""
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
        """Close every connection, so that waits on them fail at once in both processes."""
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()

    def drop(self) -> None:
        """In a forked child process, close the copied descriptors; the connections stay open."""
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
                raise TimeoutError(f"timed out waiting for rank {rank} to receive messages")
            ready = select.poll()
            for sender in waiting:
                ready.register(sender.connection, select.POLLOUT)
            if arriving is not None:
                ready.register(arriving, select.POLLIN)
            happened = ready.poll(1e3 * limit_s)
            if arriving is not None and arriving.fileno() in dict(happened):
                return
            time.sleep(_LOOK_AGAIN_S)  # a writable socket may still refuse a descriptor
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
    """Test whether this process can send itself a slot's descriptor and map the slot."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        socket.send_fds(one, [b"x"], [descriptor])
        _, arrived, _, _ = socket.recv_fds(other, 1, 1)
        if not arrived:
            raise OSError("a file descriptor sent over a socket did not arrive")
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
            # The kernel accepts connections before `accept` is called, so all ranks may connect
            # first. Once this rank has accepted all, no rank needs the folder any more.
            senders = [_connect(c, addresses[c.destination_rank], timeout_s) for c in outgoing]
            receivers = _accept(incoming, listener, timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return SharedTransport(senders, receivers)


def meeting_place() -> Path:
    """Return the folder for the sockets of a host's ranks, of a path short enough for a socket."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual) <= _MAX_FOLDER_LENGTH else "/tmp")


def _private_folder() -> Path:
    """Create a folder that only this user can access."""
    return Path(tempfile.mkdtemp(prefix="gpipe_hpc_", dir=meeting_place()))


def _connect(channel: PlacedChannel, address: str, timeout_s: float) -> SharedSender:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address)
    except OSError as error:
        raise ConnectionError(
            f"rank {channel.source_rank}: cannot connect to rank {channel.destination_rank} of "
            f"this machine at {address} ({error}); set comm.shared_memory=false on all ranks"
        ) from error
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
