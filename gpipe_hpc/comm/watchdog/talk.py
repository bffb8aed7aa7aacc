"""Two watchers make sure of each other before they believe a word."""

import os
from typing import Final

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog.lines import Line, Message

_MAX_GREETING: Final = 4096  # bytes of a hello and a proof, which take less than 1,024


class Talk:
    """One connection between watchers; `is_proven` once the other has shown that it is one of us.

    Both send a number never used before, and prove the secret over both numbers and both ranks: an
    old proof is worth nothing. Who was called proves last, so a stranger who calls gets no proof
    out of it. What comes on an unproven connection is never passed on, and it is closed once more
    has come than a greeting takes. Nothing here waits.

    `expected`: the rank that was called; None where this end was.
    """

    def __init__(
        self, line: Line, rank: int, host: str, secret: Secret, expected: int | None, now_s: float
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
        """Return what has come from a proven watcher."""
        room = _MAX_GREETING - self.line.num_read
        messages: list[Message] = []
        for message in self.line.receive() if self.is_proven else self.line.receive(room):
            if self.is_proven:
                messages.append(message)
            elif not self._shake(message):
                self.line.close()
                return []
        if not self.is_proven and self.line.num_read >= _MAX_GREETING:
            self.line.close()
        return messages

    def _shake(self, message: Message) -> bool:
        """Take a step of the greeting; False where the other cannot be one of us."""
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
            proof = _bytes(message.get("proof"))
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


def _bytes(text: object) -> bytes:
    try:
        return bytes.fromhex(str(text))
    except ValueError:
        return b""
