"""Connections of one rank with others over Gloo, made two by two and not as a mesh of all."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from gpipe_hpc.comm.collectives.group import Done, Pending, Piece, rank_names
from gpipe_hpc.comm.collectives.works import Works
from gpipe_hpc.comm.watchdog.failure import lost
from gpipe_hpc.comm.watchdog.noting import Note

ConnectTwo = Callable[[tuple[int, int]], Any]
"""Returns a process group of Gloo of two world ranks, which torch itself does not list."""


class Pairs:
    """The connections of the rank at `position` of some, for one group of them."""

    def __init__(self, ranks: tuple[int, ...], position: int, connect_two: ConnectTwo) -> None:
        self._ranks, self._position, self._connect_two = ranks, position, connect_two
        self._by_rank: dict[int, tuple[Any, int]] = {}  # and which of the two the other is

    @property
    def num_connected(self) -> int:
        """Return with how many other ranks there is a connection."""
        return len(self._by_rank)

    def connect(self, peers: Sequence[int]) -> None:
        """Connect with positions that there is no connection with yet; they do so too.

        All ranks make those that they share in one order, so none wait for one another in a ring.
        """
        new = {i for i in peers if i != self._position and self._ranks[i] not in self._by_rank}
        for _, _, start, distance in sorted(self._edge(peer) for peer in new):
            ends = self._ranks[start], self._ranks[(start + distance) % len(self._ranks)]
            low, high = sorted(ends)
            own = self._ranks[self._position]
            other = high if own == low else low
            self._by_rank[other] = self._connect_two((low, high)), int(other == high)

    def _edge(self, peer: int) -> tuple[int, int, int, int]:
        """Return the place of a connection in the order of all, the same at both ends.

        The near ones come first; of one distance, those that share no rank with one another.
        """
        n, i = len(self._ranks), self._position
        distance, start = min(((peer - i) % n, i), ((i - peer) % n, peer))
        return distance, start // distance % 2, start, distance

    def start(
        self, tag: int, sends: Sequence[Piece], receives: Sequence[Piece], note: Note
    ) -> Pending:
        """Start messages with ranks that are connected; what is expected first."""
        if not sends and not receives:
            return Done()
        try:
            started = [
                ([piece.rank], self._begin(piece, tag, is_sent=is_sent))
                for is_sent, pieces in ((False, receives), (True, sends))
                for piece in pieces
            ]
        except RuntimeError as error:
            peers = sorted({piece.rank for piece in (*sends, *receives)})
            raise lost(error, rank_names(peers)) from error
        return Works(started, note)

    def _begin(self, piece: Piece, tag: int, *, is_sent: bool) -> Any:
        group, other = self._by_rank[piece.rank]
        return (group.send if is_sent else group.recv)([piece.tensor], other, tag)

    def break_off(self, tag: int) -> None:
        """Close every connection: a wait of Gloo's that times out does."""
        for group, other in list(self._by_rank.values()):
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], other, tag).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Let go of all connections."""
        self._by_rank.clear()
