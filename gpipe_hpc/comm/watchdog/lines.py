"""Messages over a socket: a line of JSON each. Nothing that comes in is ever executed."""

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any, Final

Message = dict[str, Any]

MAX_LINE: Final = 1 << 16
MAX_TEXT: Final = 8000
"""Characters of one text; as JSON a character takes up to 12 bytes."""
_MAX_UNSENT: Final = 1 << 20
_READ: Final = 1 << 16
_MAX_AT_ONCE: Final = 1 << 20


class Line:
    """A connection that never blocks; `is_open` is False once it has ended, for any reason.

    `num_read`: bytes that have come.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.is_open = True
        self.num_read = 0
        self._connection = connection
        self._unread = b""
        self._unsent = b""

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._connection.fileno()

    @property
    def far_address(self) -> str:
        """Return the internet address of the other end; empty if it has none."""
        try:
            name = self._connection.getpeername()
        except OSError:
            return ""
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def has_unsent(self) -> bool:
        """Say whether something waits until the socket takes more."""
        return bool(self._unsent)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or keep it until `flush`; of a text no more than MAX_TEXT goes."""
        if not self.is_open:
            return
        # The other end would take a longer line for nonsense, and hang up.
        words = {name: _shortened(value) for name, value in message.items()}
        self._unsent += json.dumps(words).encode() + b"\n"
        self.flush()
        if len(self._unsent) > _MAX_UNSENT:
            self.close()  # the other end has not read for long

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # Not connected yet: still under way.
            if not (isinstance(error, BrokenPipeError | ConnectionError) or self._has_failed()):
                return
            self._end()

    def receive(self, most: int = _MAX_AT_ONCE) -> list[Message]:
        """Return the messages that are here; ends the line if they end or make no sense.

        It reads no more than `most` bytes: who sends without pause keeps nobody from other work.
        What is left is there at the next call.
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
        """End the connection at both ends."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._end()

    def drop(self) -> None:
        """Close this process's descriptor alone: for one that a fork has copied."""
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
