"""The two ends of a channel in shared memory and their protocol over a Unix socket."""

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.transport.base import Message, PlacedChannel
from gpipe_hpc.comm.transport.slots import Slot, SlotPool, message_bytes
from gpipe_hpc.comm.transport.wire import (
    EMPTY,
    NestStructure,
    StructureCache,
    assemble,
    disassemble,
)
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.pytree import Nest

_HOST: Final = HostDevice()
_WORD: Final = struct.Struct("=7q")
_DESCRIPTOR: Final = struct.Struct("=i")
_ROOM_FOR_DESCRIPTOR: Final = socket.CMSG_SPACE(_DESCRIPTOR.size)
_NONE: Final = -1
# ETOOMANYREFS: the user's processes have too many descriptors in flight.
_FULL: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.ETOOMANYREFS})


class _SlotAnnouncement(NamedTuple):
    """Announcement of a message over the socket: its fields as 8-byte integers, in this order."""

    serial: int
    microbatch: int
    structure: int
    header_bytes: int  # 0: the receiver knows the structure
    num_samples: int
    slot: int  # _NONE: the message needs no slot
    retired: int  # a slot that is not used any more; _NONE: none


class _Outgoing(NamedTuple):
    """A message that the sender has not announced yet."""

    microbatch: int
    structure: NestStructure
    tensors: list[torch.Tensor]
    num_samples: int


class SharedSender:
    """The sending end of a channel."""

    def __init__(self, channel: PlacedChannel, connection: socket.socket) -> None:
        self.connection = connection
        self.channel = channel
        self._serial = 0
        self._impatient = _impatient(connection)
        self._catalogue = StructureCache()
        self._pool = SlotPool()
        # The structure of the last message, and the bytes it needs in a slot without a header.
        self._sized: tuple[NestStructure, int] = (EMPTY, 0)
        self._waiting: deque[_Outgoing] = deque()
        # If the first of these is in its slot already: its announcement, and a descriptor to send.
        self._ready: tuple[bytes, int | None] | None = None

    @property
    def num_waiting(self) -> int:
        """Return the number of messages that are not announced yet."""
        return len(self._waiting)

    def send(self, microbatch: int, nest: Nest, num_samples: int) -> None:
        """Announce a message if the socket accepts it now; otherwise it waits for `flush`."""
        structure, tensors = disassemble(nest) if num_samples else (EMPTY, [])
        self._waiting.append(_Outgoing(microbatch, structure, tensors, num_samples))
        self.flush()

    def flush(self) -> bool:
        """Announce waiting messages until the socket is full; return whether none is left."""
        while self._waiting:
            if self._ready is None:
                self._ready = self._write(self._waiting[0])
            word, descriptor = self._ready
            try:
                if descriptor is None:
                    self._impatient.send(word)
                else:
                    socket.send_fds(self._impatient, [word], [descriptor])
            except OSError as error:
                if error.errno in _FULL:
                    return False
                raise _lost(error, self.channel.destination_rank) from error
            if descriptor is not None:
                os.close(descriptor)
            self._ready = None
            self._waiting.popleft()
        return True

    def close(self) -> None:
        """Discard waiting messages and shut down the connection."""
        if self._ready is not None and self._ready[1] is not None:
            os.close(self._ready[1])
        self._ready = None
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close this process's descriptors without shutting down the connection."""
        self.connection.close()
        self._impatient.close()

    def _write(self, message: _Outgoing) -> tuple[bytes, int | None]:
        """Copy a message into a slot; return its announcement, and the descriptor of a new slot."""
        number, header = self._catalogue.identify(message.structure)
        structure = self._catalogue[number]  # one object for all equal structures
        index, retired, descriptor = _NONE, None, None
        if size := self._size_of(header, structure):
            slot, descriptor, retired = self._pool.take(size)
            slot.write(header, structure.metas, message.tensors)
            index = slot.index
        word = _WORD.pack(
            self._serial,
            message.microbatch,
            number,
            len(header),
            message.num_samples,
            index,
            _NONE if retired is None else retired,
        )
        self._serial += 1
        return word, descriptor

    def _size_of(self, header: bytes, structure: NestStructure) -> int:
        if header:
            return message_bytes(len(header), structure.metas)
        if structure is not self._sized[0]:
            self._sized = (structure, message_bytes(0, structure.metas))
        return self._sized[1]


class SharedReceiver:
    """The receiving end of a channel."""

    def __init__(self, channel: PlacedChannel, connection: socket.socket) -> None:
        self.connection = connection
        self.channel = channel
        self._serial = 0
        self._impatient = _impatient(connection)
        self._catalogue = StructureCache()
        self._slots: dict[int, Slot] = {}

    def receive(self, microbatch: int) -> Message:
        """Block until the next message of the channel arrives and return it."""
        try:
            word, descriptor = self._next_word()
        except OSError as error:
            raise _lost(error, self.channel.source_rank) from error
        if (word.serial, word.microbatch) != (self._serial, microbatch):
            raise ConnectionError(
                f"{self.channel}: expected message {self._serial} with micro-batch {microbatch}, "
                f"got message {word.serial} with micro-batch {word.microbatch}; the ranks do not "
                f"run the same table"
            )
        self._serial += 1
        self._slots.pop(word.retired, None)
        if descriptor is not None:
            self._slots[word.slot] = Slot.attach(word.slot, descriptor)
        slot = self._slots.get(word.slot)
        if slot is None and word.slot != _NONE:
            raise ConnectionError(
                f"{self.channel}: message {word.serial} is in shared memory whose descriptor did "
                f"not arrive; the limit of open files may be too low (ulimit -n)"
            )
        if word.header_bytes:
            assert slot is not None, f"{self.channel}: a header without a slot"
            self._catalogue.learn(slot.read_header(word.header_bytes))
        structure = self._catalogue[word.structure]
        if slot is None:
            tensors = [meta.allocate(_HOST) for meta in structure.metas]  # without elements
        else:
            tensors = slot.tensors(word.header_bytes, structure.metas)
        if word.num_samples == 0:
            return Message(None, 0)
        return Message(assemble(structure, tensors), word.num_samples)

    def close(self) -> None:
        """Shut down the connection, so that waits in both processes fail."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close this process's descriptors without shutting down the connection."""
        self.connection.close()
        self._impatient.close()

    def _next_word(self) -> tuple[_SlotAnnouncement, int | None]:
        try:
            data, ancillary, _, _ = self._impatient.recvmsg(_WORD.size, _ROOM_FOR_DESCRIPTOR)
        except BlockingIOError:
            data, ancillary, _, _ = self.connection.recvmsg(_WORD.size, _ROOM_FOR_DESCRIPTOR)
        if not data:
            raise ConnectionResetError("end of file")
        if len(data) < _WORD.size:
            data += receive_exactly(self.connection, _WORD.size - len(data))
        descriptor = _DESCRIPTOR.unpack(ancillary[0][2])[0] if ancillary else None
        return _SlotAnnouncement._make(_WORD.unpack(data)), descriptor


def _impatient(connection: socket.socket) -> socket.socket:
    """Return a duplicate of a socket whose calls never block.

    Python would wait for a socket with a time-out even if MSG_DONTWAIT is given.
    """
    handle = connection.dup()
    handle.settimeout(0)
    return handle


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Block until `num_bytes` bytes are read; ConnectionResetError at the end of the stream."""
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("end of file")
        data += piece
    return data


def _lost(error: OSError, rank: int) -> ConnectionError | TimeoutError:
    if isinstance(error, TimeoutError):
        return TimeoutError(f"timed out waiting for rank {rank}")
    return ConnectionError(f"lost rank {rank}: {error}")
