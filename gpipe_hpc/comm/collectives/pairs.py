"""Pairwise Gloo connections of one rank with others, instead of a full mesh."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from gpipe_hpc.comm.collectives.group import (
    CollectiveHandle,
    CompletedHandle,
    PeerTensor,
    rank_names,
)
from gpipe_hpc.comm.collectives.works import TorchWorks
from gpipe_hpc.comm.watchdog.failure import lost
from gpipe_hpc.comm.watchdog.wait_listener import WaitListener

ConnectTwo = Callable[[tuple[int, int]], Any]
"""Returns a Gloo process group of two world ranks that is not registered with torch."""


class PairConnections:
    """The pairwise connections of the rank at `position` within one group."""

    def __init__(self, ranks: tuple[int, ...], position: int, connect_two: ConnectTwo) -> None:
        self._ranks, self._position, self._connect_two = ranks, position, connect_two
        self._by_rank: dict[int, tuple[Any, int]] = {}  # group and index of the other in it

    @property
    def num_connected(self) -> int:
        """Return the number of connected ranks."""
        return len(self._by_rank)

    def connect(self, peers: Sequence[int]) -> None:
        """Connect with the given positions if not connected yet; each of them must call this, too.

        All ranks open connections in the same order, so there is no circular wait.
        """
        new = {i for i in peers if i != self._position and self._ranks[i] not in self._by_rank}
        for _, _, start, distance in sorted(self._edge(peer) for peer in new):
            ends = self._ranks[start], self._ranks[(start + distance) % len(self._ranks)]
            low, high = sorted(ends)
            own = self._ranks[self._position]
            other = high if own == low else low
            self._by_rank[other] = self._connect_two((low, high)), int(other == high)

    def _edge(self, peer: int) -> tuple[int, int, int, int]:
        """Return the sort key of a connection, equal at both ends.

        Connections over short distances are opened first; those of equal distance that have no rank
        in common are opened concurrently.
        """
        n, i = len(self._ranks), self._position
        distance, start = min(((peer - i) % n, i), ((i - peer) % n, peer))
        return distance, start // distance % 2, start, distance

    def start(
        self,
        tag: int,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        note: WaitListener,
    ) -> CollectiveHandle:
        """Start sending to and receiving from connected ranks, receives first."""
        if not sends and not receives:
            return CompletedHandle()
        try:
            started = [
                ([piece.rank], self._begin(piece, tag, is_sent=is_sent))
                for is_sent, pieces in ((False, receives), (True, sends))
                for piece in pieces
            ]
        except RuntimeError as error:
            peers = sorted({piece.rank for piece in (*sends, *receives)})
            raise lost(error, rank_names(peers)) from error
        return TorchWorks(started, note)

    def _begin(self, piece: PeerTensor, tag: int, *, is_sent: bool) -> Any:
        group, other = self._by_rank[piece.rank]
        return (group.send if is_sent else group.recv)([piece.tensor], other, tag)

    def break_off(self, tag: int) -> None:
        """Close every connection, by receives that time out: Gloo then closes the connection."""
        for group, other in list(self._by_rank.values()):
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], other, tag).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Drop all connections."""
        self._by_rank.clear()
