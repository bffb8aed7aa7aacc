"""Mutual authentication of two watcher processes over a connection."""

import os
from typing import Final

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog.json_connection import JsonConnection, Message

_MAX_GREETING: Final = 4096  # limit in bytes of a hello and a proof, which need less than 1,024


class WatcherConnection:
    """A connection between watchers; `is_proven` is True once the peer has proved the job's secret.

    Both sides send a new random number and prove the secret over both numbers and both ranks, so an
    old proof cannot be replayed. The side that accepted the connection proves last, so an unknown
    peer obtains no proof. Messages received before authentication are never passed on, and the
    connection is closed if they exceed the size of a handshake. No method blocks.

    `expected` is the rank to which this side connects; None if it accepted the connection.
    """

    def __init__(
        self,
        line: JsonConnection,
        rank: int,
        host: str,
        secret: Secret,
        expected: int | None,
        now_s: float,
    ) -> None:
        self.line = line
        self.began_s = now_s
        self.is_proven = False
        self.peer: int | None = expected
        self.host = ""
        self._rank, self._secret, self._calls = rank, secret, expected is not None
        self._own = os.urandom(16).hex()
        self._theirs = ""
        line.send({"kind": "hello", "rank": rank, "host": host, "number": self._own})

    def receive(self) -> list[Message]:
        """Return the messages of an authenticated peer; before that, process its handshake."""
        room = _MAX_GREETING - self.line.num_read
        messages: list[Message] = []
        for message in self.line.receive() if self.is_proven else self.line.receive(room):
            if self.is_proven:
                messages.append(message)
            elif not self._advance_handshake(message):
                self.line.close()
                return []
        if not self.is_proven and self.line.num_read >= _MAX_GREETING:
            self.line.close()
        return messages

    def _advance_handshake(self, message: Message) -> bool:
        """Process one message of the handshake; return False if the peer fails it."""
        if message.get("kind") == "hello" and not self._theirs:
            rank, number = message.get("rank"), message.get("number")
            if not isinstance(rank, int) or not isinstance(number, str) or not number:
                return False
            if self.peer not in (None, rank) or rank == self._rank:
                return False
            self.peer, self._theirs, self.host = rank, number, str(message.get("host"))[:64]
            if self._calls:
                self._prove(rank)
            return True
        if message.get("kind") == "proof" and self._theirs and self.peer is not None:
            label = _label(self.peer, self._rank)
            proof = _parse_hex(message.get("proof"))
            parts = self._theirs.encode(), self._own.encode()
            self.is_proven = self._secret.proves(proof, label, *parts)
            if self.is_proven and not self._calls:
                self._prove(self.peer)
            return self.is_proven
        return False

    def _prove(self, peer: int) -> None:
        parts = self._own.encode(), self._theirs.encode()
        proof = self._secret.prove(_label(self._rank, peer), *parts)
        self.line.send({"kind": "proof", "proof": proof.hex()})


def _label(source: int, destination: int) -> str:
    return f"watcher of rank {source} to that of rank {destination}"


def _parse_hex(text: object) -> bytes:
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        return b""
