"""Transfer of large amounts of bytes between ranks, in pieces.

All ranks send their pieces concurrently. A rank sends a piece, receives the pieces of others, and
continues once its own piece has been received, so at most one piece per transfer is in flight.
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
# Above the tags of stages' channels, which count from 0, and those of their late lanes.
_FIRST_TAG: Final = 2**27
_HOST: Final = HostDevice()
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


class ByteRoute(NamedTuple):
    """Source and destination rank of a transfer."""

    source: int
    destination: int


class ByteTransfers:
    """Repeatable transfers of bytes between fixed pairs of ranks.

    Every rank of the world creates this object, even if it takes part in no transfer.

    Args:
        world: the world.
        moves: all transfers of this rank; transfers between other ranks are ignored. Both ends must
            list a transfer.
        serial: number that distinguishes objects of one world that exist at the same time.
    """

    def __init__(self, world: World, moves: Sequence[ByteRoute], serial: int) -> None:
        moves = [move for move in moves if world.rank in move]
        assert all(move.source != move.destination for move in moves), (
            f"a rank sends to itself: {moves}"
        )
        # Tags only have to differ between the two moves of a pair of ranks.
        tags = (_FIRST_TAG + 2 * serial, _FIRST_TAG + 2 * serial + 1)
        self._channels = {
            move: PlacedChannel(Channel(*move, 0), *move, tags[move.source > move.destination])
            for move in moves
        }
        self._world = world
        self._outgoing = [move for move in moves if move.source == world.rank]
        self._incoming = [move for move in moves if move.destination == world.rank]
        self._transport: Transport = world.transport(list(self._channels.values()), _HOST)

    def exchange_sizes(self, outgoing: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Send each destination the number of bytes to expect; return that of each source.

        All ranks of the transfers call this. Raises the errors of `run`.
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
            assert isinstance(came, torch.Tensor), f"expected a tensor with a size, got {came}"
            sizes[move.source] = int(came)
        transport.finish()
        return sizes

    def run(
        self,
        outgoing: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
        take: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Send and receive bytes; called by all ranks of the transfers.

        Args:
            outgoing: for each destination a flat uint8 host tensor, not to be modified until every
                rank has returned.
            sizes: number of bytes to receive from each source.
            take: called with source and each received piece, in order; it must copy the bytes.

        A transfer does not take place if both ends leave it out of their arguments. Raises
        ConnectionError or TimeoutError if another rank has ended or does not respond.
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
                    assert isinstance(came, torch.Tensor), f"expected a tensor of bytes, got {came}"
                    take(move.source, came)
            transport.finish()


def _num_pieces(outgoing: Mapping[int, torch.Tensor], sizes: Mapping[int, int]) -> int:
    longest = max([*(len(part) for part in outgoing.values()), *sizes.values()], default=0)
    return -(-longest // PIECE_BYTES)
