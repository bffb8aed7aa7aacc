"""Check that neighbouring ranks start the same collective before it runs for the first time.

Gloo silently accepts a message that is shorter than expected and aborts the process if it is
longer. So the first time a rank starts a collective (an algorithm, a number of elements and a
dtype), it sends a description to the next rank and compares that of the previous one. Later calls
cost nothing. This detects ranks that differ from the start, for example by a setting; a difference
that appears later ends in a time-out.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import torch

from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.errors import ConfigError

GREETING_BYTES: Final = 256
_DIGEST_BYTES: Final = 32
_MAX_KNOWN: Final = 4096

Greet = Callable[[Sequence[tuple[int, torch.Tensor]], Sequence[tuple[int, torch.Tensor]]], None]
"""Sends and receives host tensors, each with the position of a rank, and waits for both."""


class Agreement:
    """The collectives for which this rank has verified that its neighbours start the same one."""

    def __init__(self, place: PlanPosition, ranks: Sequence[int]) -> None:
        self._place, self._ranks = place, ranks
        self._known: set[str] = set()

    def reach(self, what: str, greet: Greet) -> None:
        """Check that the neighbouring ranks start the same collective, described by `what`.

        Communicates only the first time for each description. Raises ConfigError if the previous
        rank starts another collective.
        """
        n, i = self._place
        if n == 1 or what in self._known:
            return
        before, behind = (i - 1) % n, (i + 1) % n
        told = torch.zeros(GREETING_BYTES, dtype=torch.uint8)
        greet([(behind, _encode(what))], [(before, told)])
        if not torch.equal(told, _encode(what)):
            raise ConfigError(
                f"collective: ranks call different collectives: {what} on rank {self._ranks[i]} "
                f"and {_decode(told)} on rank {self._ranks[before]}; start all ranks with the same "
                f"configuration and tensors of the same size"
            )
        if len(self._known) >= _MAX_KNOWN:  # happens at the same call on every rank
            self._known.clear()
        self._known.add(what)


def _encode(what: str) -> torch.Tensor:
    raw = what.encode()
    room = GREETING_BYTES - _DIGEST_BYTES
    padded = raw[:room].ljust(room, b"\0") + hashlib.sha256(raw).digest()
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _decode(told: torch.Tensor) -> str:
    raw = told.numpy().tobytes()[: GREETING_BYTES - _DIGEST_BYTES]
    return raw.rstrip(b"\0").decode(errors="replace")
