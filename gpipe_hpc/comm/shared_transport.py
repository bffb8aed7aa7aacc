"""Channels between processes of one host whose tensors live in host memory.

The sender copies a boundary into a slot of shared memory, once; the receiver's stage uses it
there. A word of fixed size goes over a Unix socket: it wakes the receiver, keeps the order of the
channel, and its end of file tells at once when the other process has died. The same socket
carries back the numbers of slots that the receiver uses no more.
"""

import contextlib
import os
import shutil
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.slots import Slot, SlotPool, message_bytes
from gpipe_hpc.comm.transport import Message, PlacedChannel
from gpipe_hpc.comm.wire import EMPTY, Structure, assemble, disassemble

_WORD: Final = struct.Struct("=7q")
_HELLO: Final = struct.Struct("=3q")
_RELEASE: Final = struct.Struct("=q")
_NONE: Final = -1


class _Word(NamedTuple):
    """What is sent over the socket for each message."""

    serial: int
    microbatch: int
    structure: int
    header_bytes: int  # 0: the receiver knows the structure
    num_samples: int
    slot: int  # _NONE: nothing in memory
    retired: int  # a slot that will not be used again; _NONE: none


class _Sender:
    """The sending end of a channel."""

    def __init__(self, channel: PlacedChannel, connection: socket.socket) -> None:
        self.connection = connection
        self._channel = channel
        self._serial = 0
        self._impatient = _impatient(connection)
        self._numbers: dict[Structure, int] = {EMPTY: 0}
        self._pool = SlotPool()

    def send(self, microbatch: int, nest: Nest, num_samples: int) -> None:
        """Copy the nest into a slot and announce it."""
        structure, tensors = disassemble(nest) if num_samples else (EMPTY, [])
        number = self._numbers.get(structure)
        header = b""
        if number is None:
            number = self._numbers[structure] = len(self._numbers)
            header = structure.to_bytes()
        self._collect_released()
        index, retired, descriptor = _NONE, None, None
        size = message_bytes(len(header), structure.metas)
        if size:
            slot, descriptor, retired = self._pool.take(size)
            slot.write(header, tensors)
            index = slot.index
        word = _WORD.pack(
            self._serial,
            microbatch,
            number,
            len(header),
            num_samples,
            index,
            _NONE if retired is None else retired,
        )
        self._serial += 1
        try:
            if descriptor is None:
                self.connection.sendall(word)
            else:
                socket.send_fds(self.connection, [word], [descriptor])
        except OSError as error:
            raise _lost(error, self._channel.destination_rank) from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _collect_released(self) -> None:
        """Take back the slots that the receiver has released, without waiting."""
        try:
            data = self._impatient.recv(4096 * _RELEASE.size)
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(error, self._channel.destination_rank) from error
        if len(data) % _RELEASE.size:
            data += _receive_exactly(self.connection, -len(data) % _RELEASE.size)
        for (index,) in _RELEASE.iter_unpack(data):
            self._pool.give_back(index)


class _Receiver:
    """The receiving end of a channel."""

    def __init__(self, channel: PlacedChannel, connection: socket.socket) -> None:
        self.connection = connection
        self._channel = channel
        self._serial = 0
        self._impatient = _impatient(connection)
        self._structures: list[Structure] = [EMPTY]
        self._slots: dict[int, Slot] = {}
        self._released: deque[int] = deque()

    def receive(self, microbatch: int) -> Message:
        """Return the next message of the channel, waiting until it is here."""
        self._tell_released()
        try:
            word, descriptor = self._next_word()
        except OSError as error:
            raise _lost(error, self._channel.source_rank) from error
        if (word.serial, word.microbatch) != (self._serial, microbatch):
            raise ConnectionError(
                f"{self._channel}: expected message {self._serial} with micro-batch {microbatch}, "
                f"got message {word.serial} with {word.microbatch}; the ranks do not run the "
                f"same table"
            )
        self._serial += 1
        self._slots.pop(word.retired, None)
        if descriptor is not None:
            self._slots[word.slot] = Slot.attach(word.slot, descriptor)
        slot = self._slots.get(word.slot)
        if word.header_bytes:
            assert slot is not None, f"{self._channel}: a header without a slot"
            self._structures.append(Structure.from_bytes(slot.read_header(word.header_bytes)))
        structure = self._structures[word.structure]
        tensors = []
        if slot is not None:
            index = slot.index
            tensors = slot.tensors(word.header_bytes, structure.metas, lambda: self._release(index))
        if word.num_samples == 0:
            return Message(None, 0)
        return Message(assemble(structure, tensors), word.num_samples)

    def _next_word(self) -> tuple[_Word, int | None]:
        data, descriptors, _, _ = socket.recv_fds(self.connection, _WORD.size, 1)
        if not data:
            raise ConnectionResetError("end of file")
        data += _receive_exactly(self.connection, _WORD.size - len(data))
        return _Word(*_WORD.unpack(data)), descriptors[0] if descriptors else None

    def _release(self, index: int) -> None:
        # Called whenever the last tensor dies: on any thread, also while the process ends.
        self._released.append(index)
        self._tell_released()

    def _tell_released(self) -> None:
        """Tell the sender, without ever waiting for it: it reads only when it sends."""
        while self._released:
            try:
                index = self._released.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                self._impatient.send(_RELEASE.pack(index))
            except OSError:  # full: told with the next message; or gone: nobody asks any more
                self._released.appendleft(index)
                return


class SharedTransport:
    """Carry boundaries between processes of one host in shared memory."""

    def __init__(self, senders: Sequence[_Sender], receivers: Sequence[_Receiver]) -> None:
        self._senders = {sender._channel: sender for sender in senders}
        self._receivers = {receiver._channel: receiver for receiver in receivers}

    def send(
        self, channel: PlacedChannel, lane: str, microbatch: int, nest: Nest, num_samples: int
    ) -> None:
        """Copy into shared memory and announce; nothing of the nest is kept."""
        self._senders[channel].send(microbatch, nest, num_samples)

    def post(self, channel: PlacedChannel, lane: str, microbatch: int) -> None:
        """Do nothing: the sender brings the memory."""

    def wait(self, channel: PlacedChannel, lane: str, microbatch: int) -> Message:
        """Return the next message of the channel, whose tensors lie in shared memory."""
        return self._receivers[channel].receive(microbatch)

    def finish(self) -> None:
        """Return at once: what was sent has left."""

    def close(self) -> None:
        """Close every connection; whoever waits on one, here or there, is told at once."""
        connections = [sender.connection for sender in self._senders.values()]
        connections += [receiver.connection for receiver in self._receivers.values()]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def host_identity() -> str:
    """Return a text that two processes share if they can share memory; empty: with nobody."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # One mount namespace: a socket's path means the same to both.
        return f"{boot} {os.readlink('/proc/self/ns/mnt')}" if hasattr(os, "memfd_create") else ""
    except OSError:
        return ""


def open_shared_transport(
    channels: Sequence[PlacedChannel], rank: int, everybody: Group, timeout_s: float
) -> SharedTransport:
    """Connect the channels, all between ranks of one host; the same call on every rank."""
    folder = Path(tempfile.mkdtemp(prefix="gpipe_hpc_"))  # for this user alone
    outgoing = [c for c in channels if c.source_rank == rank]
    incoming = [c for c in channels if c.destination_rank == rank]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "s"))
            listener.listen(len(incoming) + 1)
            listener.settimeout(timeout_s)
            addresses = everybody.all_gather_object(str(folder / "s"))
            senders = [
                _connect(c, addresses[everybody.ranks.index(c.destination_rank)], timeout_s)
                for c in outgoing
            ]
            receivers = _accept(incoming, listener, timeout_s)
        everybody.all_gather_object("connected")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return SharedTransport(senders, receivers)


def _connect(channel: PlacedChannel, address: str, timeout_s: float) -> _Sender:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    connection.connect(address)
    connection.sendall(_HELLO.pack(channel.source_rank, channel.destination_rank, channel.tag))
    return _Sender(channel, connection)


def _accept(
    channels: Sequence[PlacedChannel], listener: socket.socket, timeout_s: float
) -> list[_Receiver]:
    by_hello = {(c.source_rank, c.destination_rank, c.tag): c for c in channels}
    receivers = []
    for _ in channels:
        connection, _ = listener.accept()
        connection.settimeout(timeout_s)
        hello = _HELLO.unpack(_receive_exactly(connection, _HELLO.size))
        receivers.append(_Receiver(by_hello[hello[0], hello[1], hello[2]], connection))
    return receivers


def _impatient(connection: socket.socket) -> socket.socket:
    """Return a second handle of the connection whose calls never wait.

    With a timeout set, Python waits even where the system call is told not to.
    """
    handle = connection.dup()
    handle.settimeout(0)
    return handle


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("end of file")
        data += piece
    return data


def _lost(error: OSError, rank: int) -> ConnectionError | TimeoutError:
    if isinstance(error, TimeoutError):
        return TimeoutError(f"waited in vain for rank {rank}: {error}")
    return ConnectionError(f"lost rank {rank}: {error}")
