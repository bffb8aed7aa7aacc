"""All-reduce of small tensors between processes of one host, in shared memory.

Gloo hands every collective to a thread of its own. If all cores compute, waiting for that thread to
be scheduled takes longer than the sum: 1.3 ms on average on two cores, half a step of tiny layers.
Here the calling thread sends its tensor to all ranks and adds theirs itself, in Gloo's order, so
that the result has the same bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch

from gpipe_hpc.comm.collectives.group import rank_names
from gpipe_hpc.comm.collectives.orders import in_gloo_order
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
    """Sums tensors over processes of one host; all call it in the same order, from one thread.

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
        self._ranks, self._transport, self._num_sums = ranks, transport, 0

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is small, dense and on the host; the same on all ranks."""
        return (
            on_host(tensor)
            and tensor.nbytes <= _LARGEST_BYTES
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
        )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` in place, bitwise equal on all ranks and to Gloo's sum.

        Raises ConnectionError if a rank has ended or sums another tensor, TimeoutError if a rank
        does not respond.
        """
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            own = tensor.detach()
            terms = self._exchange(own)
            if len(terms) == 2:  # in either order
                torch.add(*terms, out=own)
                return
            rows = torch.stack([term.view(-1) for term in terms])
            order = _gloo_order(rows.shape[1], own.element_size(), len(terms))
            first, *others = rows.gather(0, order)
            for other in others:
                first += other
            own.view(-1).copy_(first)

    def _exchange(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks."""
        number, transport = self._num_sums, self._transport
        self._num_sums += 1
        for channel in self._outgoing:
            transport.send(channel, _LANE, number, own, 1)
        terms = []
        for rank, source in zip(self._ranks, self._sources, strict=True):
            term = own if source is None else transport.wait(source, _LANE, number).nest
            assert isinstance(term, torch.Tensor), f"rank {rank} sent no tensor"
            if (term.shape, term.dtype) != (own.shape, own.dtype):
                raise ConnectionError(
                    f"sum over {rank_names(self._ranks)}: expected {own.dtype} "
                    f"{tuple(own.shape)} from rank {rank}, got {term.dtype} {tuple(term.shape)}; "
                    f"all ranks must sum the same tensors in the same order"
                )
            terms.append(term)
        # The others wait for a message that was not accepted at once.
        transport.finish()
        return terms


@lru_cache(maxsize=64)
def _gloo_order(count: int, element_bytes: int, size: int) -> torch.Tensor:
    """Return int64[size, count]: whose term Gloo adds first, second, ... for each element."""
    order = in_gloo_order(count, element_bytes, size)
    with torch.inference_mode(False):
        columns = [
            torch.tensor(list(order.chain(owner))).view(-1, 1).expand(-1, number)
            for owner, number in enumerate(order.counts)
        ]
        return torch.cat(columns, 1)
