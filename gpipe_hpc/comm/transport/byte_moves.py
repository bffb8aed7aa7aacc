"""Bytes from some ranks to others, in pieces: for what is too big for one message.

The pieces of all ranks go side by side. A rank sends its next one, takes those that come, and goes
on once its own has left, so at most one piece of each is on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.schedule import Channel

PIECE_BYTES: Final = 16 * 2**20
_LANE: Final = "bytes"
_SIZES: Final = "sizes"
# Apart from the tags of stages' channels, which count from 0, and from those of their late lanes.
_FIRST_TAG: Final = 2**27
_HOST: Final = HostDevice()
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


class Move(NamedTuple):
    """Bytes that go from one rank to another."""

    source: int
    destination: int


class ByteMoves:
    """Moves of bytes between ranks; each move may happen many times.

    `moves`: those that this rank has a part in, or more. Every rank of the world makes it, also one
    that has none, and both ends of a move name it. `serial` tells apart those of one world that
    live at the same time.
    """

    def __init__(self, world: World, moves: Sequence[Move], serial: int) -> None:
        moves = [move for move in moves if world.rank in move]
        assert all(move.source != move.destination for move in moves), f"to itself: {moves}"
        # No two moves of one pair of ranks have one tag; more is not asked of tags.
        tags = (_FIRST_TAG + 2 * serial, _FIRST_TAG + 2 * serial + 1)
        self._channels = {
            move: PlacedChannel(Channel(*move, 0), *move, tags[move.source > move.destination])
            for move in moves
        }
        self._world = world
        self._outgoing = [move for move in moves if move.source == world.rank]
        self._incoming = [move for move in moves if move.destination == world.rank]
        self._transport: Transport = world.transport(list(self._channels.values()), _HOST)

    def tell_sizes(self, outgoing: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Tell each destination how much is to come; return what the sources say.

        All ranks of the moves call it. Raises as `run`.
        """
        transport = self._transport
        for move in self._outgoing:
            size = torch.tensor([len(outgoing[move.destination])])
            transport.send(self._channels[move], _SIZES, 0, size, 1)
        sizes = {}
        for move in self._incoming:
            channel = self._channels[move]
            transport.post(channel, _SIZES, 0)
            came = transport.wait(channel, _SIZES, 0).nest
            assert isinstance(came, torch.Tensor), f"a size comes as a tensor, not {came}"
            sizes[move.source] = int(came)
        transport.finish()
        return sizes

    def run(
        self,
        outgoing: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
        take: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Send bytes and take those that come; all ranks of the moves call it.

        `outgoing`: by destination, one-dimensional uint8 tensors on the host, not changed until
        every rank has returned. `sizes`: of what comes, by source. A move that both of its ends
        leave out does not happen. `take(source, piece)` is called with each piece, in order; it
        keeps the bytes, not the tensor. Raises ConnectionError or TimeoutError if another rank is
        gone or silent.
        """
        transport = self._transport
        for turn in range(_num_pieces(outgoing, sizes)):
            span = slice(turn * PIECE_BYTES, (turn + 1) * PIECE_BYTES)
            for move in self._outgoing:
                piece = outgoing.get(move.destination, _NOTHING)[span]
                if len(piece):
                    channel = self._channels[move]
                    transport.send(channel, _LANE, turn, piece, 1)
            for move in self._incoming:
                if turn * PIECE_BYTES < sizes.get(move.source, 0):
                    channel = self._channels[move]
                    transport.post(channel, _LANE, turn)
                    came = transport.wait(channel, _LANE, turn).nest
                    assert isinstance(came, torch.Tensor), f"bytes come as a tensor, not {came}"
                    take(move.source, came)
            transport.finish()


def _num_pieces(outgoing: Mapping[int, torch.Tensor], sizes: Mapping[int, int]) -> int:
    longest = max([*(len(part) for part in outgoing.values()), *sizes.values()], default=0)
    return -(-longest // PIECE_BYTES)
