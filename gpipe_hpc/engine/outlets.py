"""What leaves a stage lies in memory that nobody else writes into.

A layer may keep its output and write into it again: as scratch for the next micro-batch, or as a
running value. In one piece nobody notices; here that output may still be on its way to another
rank, or be kept there for a recomputation. So what leaves a stage is looked at: memory that
somebody else refers to as well is copied. Most layers keep nothing, and nothing is copied.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_hpc.comm.nests import map_tensors, tensors_of

N = TypeVar("N")

_WeakStorage: Final[Any] = StorageWeakRef  # torch gives it no types


class Outlets:
    """Let tensors leave a stage in memory of their own.

    A graph refers to outputs, too (tanh keeps its own). Whether it was the graph alone is known
    once the graph is gone: until then, outputs of that place are copied.
    """

    def __init__(self) -> None:
        # Of places whose outputs were referred to while there was a graph: whether by others too.
        self._are_kept: dict[Hashable, bool] = {}
        self._watched: dict[int, list[tuple[Hashable, Any]]] = {}

    def with_graph(
        self, nest: N, given: Iterable[torch.Tensor], place: Hashable, microbatch: int
    ) -> N:
        """Return what leaves a place, detached before, while there is a graph of what made it."""
        is_graphs = self._are_kept.get(place) is False
        held = _held_elsewhere(tensors_of(nest), given, counts_references=not is_graphs)
        if held and place not in self._are_kept:
            watched = self._watched.setdefault(microbatch, [])
            watched += [(place, _WeakStorage(storage)) for storage in held.values()]
        return _copied(nest, held)

    def graph_is_gone(self, microbatch: int) -> None:
        """Find out who refers to the outputs of a micro-batch still."""
        for place, storage in self._watched.pop(microbatch, ()):
            self._are_kept[place] = self._are_kept.get(place, False) or not storage.expired()


def apart(nest: N, given: Iterable[torch.Tensor]) -> N:
    """Return a nest of detached tensors, copied where somebody else refers to their memory.

    Memory of `given` may be passed on: whoever made it has looked at it. Nobody but the caller
    and `nest` may refer to the tensors themselves.
    """
    return _copied(nest, _held_elsewhere(tensors_of(nest), given))


def _held_elsewhere(
    tensors: Sequence[torch.Tensor],
    given: Iterable[torch.Tensor],
    *,
    counts_references: bool = True,
) -> dict[int, Any]:
    """Return the storages, by address, that somebody besides `tensors` and `given` refers to.

    Without counting, those alone that torch did not allocate.
    """
    storages: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
            counts[storage._cdata] = counts.get(storage._cdata, 0) + 1
            del storage
    known = {tensor.untyped_storage()._cdata for tensor in given if _is_plain(tensor)}
    return {
        address: storage
        for address, storage in storages.items()
        if address not in known
        and (
            # Of memory that torch did not allocate (NumPy's) nobody knows who refers to it.
            not storage.resizable()
            # One more reference is that of `storages`.
            or (counts_references and torch._C._storage_Use_Count(address) > counts[address] + 1)
        )
    }


def _copied(nest: N, held: Mapping[int, Any]) -> N:
    if not held:
        return nest

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_plain(tensor) or tensor.untyped_storage()._cdata not in held:
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return cast(N, map_tensors(copied, nest))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
