"""All-reduce of small tensors between processes of one host, in shared memory.

Gloo hands every collective to a thread of its own. If all cores compute, waiting for that thread to
be scheduled takes longer than the sum: 1.3 ms on average on two cores, half a step of tiny layers.
Here the calling thread sends its tensor to all ranks and adds theirs itself.
"""

from collections.abc import Sequence
from typing import Final

import torch

from gpipe_hpc.comm.transport.base import PlacedChannel, Transport
from gpipe_hpc.device.device import on_host
from gpipe_hpc.schedule import Channel

_LANE: Final = "sum"
# Each rank reads the tensors of all others; Gloo's algorithms move less for large ones.
_LARGEST_BYTES: Final = 2**16


def all_channels(ranks: Sequence[int]) -> list[PlacedChannel]:
    """Return a channel from each rank to every other one."""
    return [PlacedChannel(Channel(a, b, 0), a, b, 0) for a in ranks for b in ranks if a != b]


class SharedMemorySum:
    """Sums tensors over the processes of one host, which all make the same calls.

    Args:
        ranks: The world ranks, ascending.
        rank: This rank.
        transport: A transport in shared memory with the channels of `all_channels`.
    """

    def __init__(self, ranks: Sequence[int], rank: int, transport: Transport) -> None:
        channels = all_channels(ranks)
        self._outgoing = [each for each in channels if each.source_rank == rank]
        incoming = {c.source_rank: c for c in channels if c.destination_rank == rank}
        self._sources = [incoming.get(each) for each in ranks]  # None: this rank
        self._transport, self._num_sums = transport, 0

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the host and small; the same on all ranks."""
        return on_host(tensor) and tensor.nbytes <= _LARGEST_BYTES

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place, in the order of the ranks, bitwise equal on all.

        Raises ConnectionError if a rank has ended, TimeoutError if it does not respond.
        """
        number, transport = self._num_sums, self._transport
        self._num_sums += 1
        for outgoing in self._outgoing:
            transport.send(outgoing, _LANE, number, tensor, 1)
        total: torch.Tensor | None = None
        for source in self._sources:
            term = tensor if source is None else transport.wait(source, _LANE, number).nest
            assert isinstance(term, torch.Tensor), f"expected a tensor, got {type(term).__name__}"
            if term.shape != tensor.shape:
                raise ConnectionError(
                    f"{source}: expected a tensor {tuple(tensor.shape)} to sum, got "
                    f"{tuple(term.shape)}; all ranks must make the same calls"
                )
            total = term.clone() if total is None else total.add_(term)
        assert total is not None, "a group has ranks"
        tensor.copy_(total)
