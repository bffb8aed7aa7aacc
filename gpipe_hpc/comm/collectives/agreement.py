"""What neighbours tell one another before they carry out a plan of a new kind.

Gloo lets a message be shorter than expected without a word, and ends the process where it is
longer. So the first time that a rank starts something (an algorithm, over so many elements of a
dtype), it tells the next rank what, and looks whether the one before does the same. Later times
cost nothing. Ranks that differ from the first time on, as by a setting, are found so; one that
differs later is waited for in vain, and then the time-out ends all.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import torch

from gpipe_hpc.comm.collectives.plan import Place
from gpipe_hpc.errors import ConfigError

GREETING_BYTES: Final = 256
_DIGEST_BYTES: Final = 32
_MAX_KNOWN: Final = 4096

Greet = Callable[[Sequence[tuple[int, torch.Tensor]], Sequence[tuple[int, torch.Tensor]]], None]
"""Sends and receives tensors on the host, each with the position of a rank, and waits for both."""


class Agreement:
    """Which kinds of plans the ranks of a group have found that all start alike."""

    def __init__(self, place: Place, ranks: Sequence[int]) -> None:
        self._place, self._ranks = place, ranks
        self._known: set[str] = set()

    def reach(self, what: str, greet: Greet) -> None:
        """Return once the neighbours have said that they start `what`.

        Raises ConfigError if the one before says something else.
        """
        n, i = self._place
        if n == 1 or what in self._known:
            return
        before, behind = (i - 1) % n, (i + 1) % n
        told = torch.zeros(GREETING_BYTES, dtype=torch.uint8)
        greet([(behind, _told(what))], [(before, told)])
        if not torch.equal(told, _told(what)):
            raise ConfigError(
                f"collective: expected the same one on every rank, got {what} on rank "
                f"{self._ranks[i]} and {_read(told)} on rank {self._ranks[before]}; start all "
                f"ranks with one configuration, and tensors of one size"
            )
        if len(self._known) >= _MAX_KNOWN:  # the same moment on every rank
            self._known.clear()
        self._known.add(what)


def _told(what: str) -> torch.Tensor:
    raw = what.encode()
    room = GREETING_BYTES - _DIGEST_BYTES
    padded = raw[:room].ljust(room, b"\0") + hashlib.sha256(raw).digest()
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _read(told: torch.Tensor) -> str:
    raw = told.numpy().tobytes()[: GREETING_BYTES - _DIGEST_BYTES]
    return raw.rstrip(b"\0").decode(errors="replace")
