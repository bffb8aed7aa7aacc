"""The two ends of a channel in shared memory: what they say to one another over their socket."""

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.comm.slots import Slot, SlotPool, message_bytes
from gpipe_hpc.comm.transport import Message, PlacedChannel
from gpipe_hpc.comm.wire import EMPTY, Catalogue, Structure, assemble, disassemble

_HOST: Final = torch.device("cpu")
_WORD: Final = struct.Struct("=7q")
_RELEASE: Final = struct.Struct("=q")
_NONE: Final = -1
# The last: the user's processes have as many descriptors under way as they may have open.
_FULL: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.ETOOMANYREFS})


class _Word(NamedTuple):
    """What is sent over the socket for each message."""

    serial: int
    microbatch: int
    structure: int
    header_bytes: int  # 0: the receiver knows the structure
    num_samples: int
    slot: int  # _NONE: nothing in memory
    retired: int  # a slot that will not be used again; _NONE: none


class _Outgoing(NamedTuple):
    """A message that has not left yet."""

    microbatch: int
    structure: Structure
    tensors: list[torch.Tensor]
    num_samples: int


class SharedSender:
    """The sending end of a channel."""

    def __init__(self, channel: PlacedChannel, connection: socket.socket) -> None:
        self.connection = connection
        self.channel = channel
        self._serial = 0
        self._impatient = _impatient(connection)
        self._catalogue = Catalogue()
        self._pool = SlotPool()
        self._waiting: deque[_Outgoing] = deque()
        # The first of those, if it lies in its slot already: its word, and a descriptor to pass.
        self._ready: tuple[bytes, int | None] | None = None

    @property
    def num_waiting(self) -> int:
        """Return how many messages have not left."""
        return len(self._waiting)

    def send(self, microbatch: int, nest: Nest, num_samples: int) -> None:
        """Send what the socket takes now; the rest waits for `flush`."""
        structure, tensors = disassemble(nest) if num_samples else (EMPTY, [])
        self._waiting.append(_Outgoing(microbatch, structure, tensors, num_samples))
        self.flush()

    def flush(self) -> bool:
        """Copy into slots and announce, while the socket has room; say if all has left."""
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
        """Forget what has not left, and tell the other process."""
        if self._ready is not None and self._ready[1] is not None:
            os.close(self._ready[1])
        self._ready = None
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _write(self, message: _Outgoing) -> tuple[bytes, int | None]:
        """Copy a message into a slot; return its word and the slot's descriptor if it is new."""
        structure = message.structure
        number, header = self._catalogue.identify(structure)
        self._collect_released()
        index, retired, descriptor = _NONE, None, None
        size = message_bytes(len(header), structure.metas)
        if size:
            slot, descriptor, retired = self._pool.take(size)
            slot.write(header, message.tensors)
            index = slot.index
        word = _Word(
            self._serial,
            message.microbatch,
            number,
            len(header),
            message.num_samples,
            index,
            _NONE if retired is None else retired,
        )
        self._serial += 1
        return _WORD.pack(*word), descriptor

    def _collect_released(self) -> None:
        """Take back the slots that the receiver has released, without waiting."""
        try:
            data = self._impatient.recv(4096 * _RELEASE.size)
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(error, self.channel.destination_rank) from error
        if len(data) % _RELEASE.size:
            data += receive_exactly(self.connection, -len(data) % _RELEASE.size)
        for (index,) in _RELEASE.iter_unpack(data):
            self._pool.give_back(index)


class SharedReceiver:
    """The receiving end of a channel."""

    def __init__(self, channel: PlacedChannel, connection: socket.socket) -> None:
        self.connection = connection
        self.channel = channel
        self._serial = 0
        self._impatient = _impatient(connection)
        self._catalogue = Catalogue()
        self._slots: dict[int, Slot] = {}
        self._released: deque[int] = deque()

    def receive(self, microbatch: int) -> Message:
        """Return the next message of the channel, waiting until it is here."""
        self._tell_released()
        try:
            word, descriptor = self._next_word()
        except OSError as error:
            raise _lost(error, self.channel.source_rank) from error
        if (word.serial, word.microbatch) != (self._serial, microbatch):
            raise ConnectionError(
                f"{self.channel}: expected message {self._serial} with micro-batch {microbatch}, "
                f"got message {word.serial} with {word.microbatch}; the ranks do not run the "
                f"same table"
            )
        self._serial += 1
        self._slots.pop(word.retired, None)
        if descriptor is not None:
            self._slots[word.slot] = Slot.attach(word.slot, descriptor)
        slot = self._slots.get(word.slot)
        if word.header_bytes:
            assert slot is not None, f"{self.channel}: a header without a slot"
            self._catalogue.learn(Structure.from_bytes(slot.read_header(word.header_bytes)))
        structure = self._catalogue[word.structure]
        if slot is None:
            tensors = [meta.allocate(_HOST) for meta in structure.metas]  # without elements
        else:
            index = slot.index
            tensors = slot.tensors(word.header_bytes, structure.metas, lambda: self._release(index))
        if word.num_samples == 0:
            return Message(None, 0)
        return Message(assemble(structure, tensors), word.num_samples)

    def close(self) -> None:
        """Tell whoever waits on the connection, here or there, that it has ended."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _next_word(self) -> tuple[_Word, int | None]:
        data, descriptors, _, _ = socket.recv_fds(self.connection, _WORD.size, 1)
        if not data:
            raise ConnectionResetError("end of file")
        data += receive_exactly(self.connection, _WORD.size - len(data))
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


def _impatient(connection: socket.socket) -> socket.socket:
    """Return a second handle of the connection whose calls never wait.

    With a timeout set, Python waits even where the system call is told not to.
    """
    handle = connection.dup()
    handle.settimeout(0)
    return handle


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return the next bytes, waiting for all of them; ConnectionResetError at the end."""
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
