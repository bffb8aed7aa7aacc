"""Pack many small tensors into few buffers, for broadcasts and for kernels on many tensors.

Otherwise the broadcast of a model with a thousand small tensors would pay the latency of a thousand
messages.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import torch

from gpipe_hpc.comm.collectives.group import CollectiveHandle, Group

T = TypeVar("T", bound=torch.Tensor)

PACK: Final = 2**22
"""Largest number of elements, over several small tensors, that are processed together."""

PACK_BYTES: Final = 32 * 2**20
_ALIGNED_TO: Final = 16  # bytes of the largest element, enough to view any dtype

StartBroadcast = Callable[[Group, torch.Tensor, int], CollectiveHandle]


def broadcast_packed(
    group: Group,
    tensors: Sequence[torch.Tensor],
    root: int,
    *,
    pack_bytes: int = PACK_BYTES,
    start: StartBroadcast = lambda group, flat, root: group.start_broadcast(flat, root),
) -> int:
    """Broadcast tensors of any dtypes and strides in packs; return the number of packs sent.

    All ranks must pass tensors of the same shapes and dtypes in the same order. One pack is in
    memory at a time; a contiguous tensor that fills a pack by itself is not copied. `start`
    replaces `group.start_broadcast`.
    """
    num_sent = 0
    if group.size == 1:
        return num_sent
    # Group the tensors by device; the sort is stable.
    ordered = sorted((t for t in tensors if t.numel()), key=lambda t: str(t.device))
    for pack in _packs(ordered, pack_bytes):
        num_sent += 1
        if len(pack) == 1 and _is_row(pack[0]):
            start(group, bytes_of(pack[0]), root).wait()  # without a copy
            continue
        places = list(_places(pack))
        flat = torch.empty(places[-1].stop, dtype=torch.uint8, device=pack[0].device)
        for tensor, place in zip(pack, places, strict=True):
            flat[place].copy_(bytes_of(tensor))
        start(group, flat, root).wait()
        for tensor, place in zip(pack, places, strict=True):
            tensor.copy_(flat[place].view(tensor.dtype).view(tensor.shape))
    return num_sent


def _packs(tensors: Sequence[torch.Tensor], pack_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield lists of consecutive tensors on one device that fill a pack."""
    pack: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        room = _aligned(tensor.nbytes)
        if pack and (size + room > pack_bytes or tensor.device != pack[0].device):
            yield pack
            pack, size = [], 0
        pack.append(tensor)
        size += room
    if pack:
        yield pack


def _places(pack: Sequence[torch.Tensor]) -> Iterator[slice]:
    start = 0
    for tensor in pack:
        yield slice(start, start + tensor.nbytes)
        start += _aligned(tensor.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_TO) * _ALIGNED_TO


def _is_row(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous and has no pending conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as flat bytes; a copy if it is not contiguous."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def packs(tensors: Sequence[T], most: int) -> Iterator[list[T]]:
    """Yield lists of consecutive tensors of at most `most` elements in total, or single tensors."""
    pack: list[T] = []
    num_elements = 0
    for tensor in tensors:
        if num_elements + tensor.numel() > most and pack:
            yield pack
            pack, num_elements = [], 0
        pack.append(tensor)
        num_elements += tensor.numel()
    if pack:
        yield pack
