"""Messages over a socket, one JSON object per line; received data is never executed."""

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any, Final

Message = dict[str, Any]

MAX_LINE: Final = 1 << 16
MAX_TEXT: Final = 8000
"""Largest number of characters of one text; in JSON a character takes up to 12 bytes."""
_MAX_UNSENT: Final = 1 << 20
_READ: Final = 1 << 16
_MAX_AT_ONCE: Final = 1 << 20


class JsonConnection:
    """A non-blocking connection that sends and receives messages; `num_read` counts received bytes.

    `is_open` becomes False when the connection has ended for any reason.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.is_open = True
        self.num_read = 0
        self._connection = connection
        self._unread = b""
        self._unsent = b""

    def fileno(self) -> int:
        """Return the file descriptor for polling."""
        return self._connection.fileno()

    @property
    def far_address(self) -> str:
        """Return the IP address of the other end; empty for a Unix socket."""
        try:
            name = self._connection.getpeername()
        except OSError:
            return ""
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def has_unsent(self) -> bool:
        """Return whether buffered data waits until the socket accepts more."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or buffer it until `flush`; texts are cut to MAX_TEXT characters."""
        if not self.is_open:
            return
        # The other end closes the connection if a line is longer.
        words = {name: _shortened(value) for name, value in message.items()}
        self._unsent += json.dumps(words).encode() + b"\n"
        self.flush()
        if len(self._unsent) > _MAX_UNSENT:
            self.close()  # the other end has stopped reading

    def flush(self) -> None:
        """Send as much buffered data as the socket accepts."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # The connection may still be in progress.
            if not (isinstance(error, BrokenPipeError | ConnectionError) or self._has_failed()):
                return
            self._end()

    def receive(self, most: int = _MAX_AT_ONCE) -> list[Message]:
        """Return the messages received so far; close the connection on its end or invalid data.

        Reads at most `most` bytes, so that a peer that sends much does not block other work; the
        next call reads the rest.
        """
        left = most
        try:
            while left > 0:
                piece = self._connection.recv(min(_READ, left))
                if not piece:
                    self._end()
                    break
                left -= len(piece)
                self.num_read += len(piece)
                self._unread += piece
                if len(self._unread) > 2 * MAX_LINE and b"\n" not in self._unread:
                    raise ValueError("a line without end")
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ValueError):
            self._end()
        *whole, self._unread = self._unread.split(b"\n")
        return self._parsed(whole)

    def close(self) -> None:
        """Close the connection at both ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._end()

    def drop(self) -> None:
        """Close only this process's copy of the descriptor, made by a fork."""
        self._end()

    def _parsed(self, lines: list[bytes]) -> list[Message]:
        messages: list[Message] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                self._end()
                break
            messages.append(message)
        return messages

    def _has_failed(self) -> bool:
        try:
            return self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        except OSError:
            return True

    def _end(self) -> None:
        self.is_open = False
        self._connection.close()


def _shortened(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= MAX_TEXT:
        return value
    return f"{value[:MAX_TEXT]} ... ({len(value) - MAX_TEXT} more characters)"
