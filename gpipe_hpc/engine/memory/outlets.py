"""What leaves a stage lies in memory that nobody else writes into.

A layer may keep its output and write into it again: as scratch for the next micro-batch, or as a
running value. In one piece nobody notices; here that output may still be on its way to another
rank, or be kept there for a recomputation. So what leaves a stage is looked at: memory that
somebody else refers to as well is copied. Most layers keep nothing, and nothing is copied.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import GradientEdge

from gpipe_hpc.comm.aliases import cloned, is_plain
from gpipe_hpc.comm.nests import map_tensors, tensors_of
from gpipe_hpc.engine.stages.routes import State
from gpipe_hpc.torch_compat import storage_use_count

N = TypeVar("N")


class Outlets:
    """Let tensors leave a stage in memory of their own where there is a graph of what made them.

    The graph may refer to them, too: tanh keeps its output. Such a one is left where it is, as
    autograd itself refuses a backward through memory that was written to. The graph is searched
    once for each place where somebody refers to what leaves.
    """

    def __init__(self) -> None:
        # By place and number of tensors: which of them a graph has saved.
        self._saved: dict[Hashable, list[bool]] = {}

    def apart(
        self,
        nest: N,
        given: Iterable[torch.Tensor],
        place: Hashable,
        ends: Iterable[GradientEdge | None],
    ) -> N:
        """Return what leaves a place, as `apart` does; `ends`: where its graph is entered."""
        tensors = _tensors(nest)
        held = _held_elsewhere(tensors, given)
        if not held:
            return nest
        key = (place, len(tensors))
        saved = self._saved.get(key)
        if saved is None:
            found = _saved_storages(edge.node for edge in ends if edge is not None)
            saved = [is_plain(t) and t.untyped_storage()._cdata in found for t in tensors]
            self._saved[key] = saved
        for tensor, is_saved in zip(tensors, saved, strict=True):
            # Of what torch did not allocate autograd does not know when it is written to.
            if is_saved and tensor.untyped_storage().resizable():
                held.pop(tensor.untyped_storage()._cdata, None)
        return _copied(nest, held)


def apart(nest: N, given: Iterable[torch.Tensor]) -> N:
    """Return a nest of detached tensors, copied where somebody else refers to their memory.

    Memory of `given` may be passed on: whoever made it has looked at it. Nobody but the caller
    and `nest` may refer to the tensors themselves.
    """
    return _copied(nest, _held_elsewhere(_tensors(nest), given))


def _tensors(nest: Any) -> list[torch.Tensor]:
    return nest.tensors() if isinstance(nest, State) else tensors_of(nest)


def _held_elsewhere(
    tensors: Sequence[torch.Tensor], given: Iterable[torch.Tensor]
) -> dict[int, Any]:
    """Return the storages, by address, that somebody besides `tensors` and `given` refers to."""
    storages: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for tensor in tensors:
        if is_plain(tensor):
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
            counts[storage._cdata] = counts.get(storage._cdata, 0) + 1
            del storage
    # Of memory that torch did not allocate (NumPy's) nobody knows who refers to it. One more
    # reference is that of `storages`.
    held = {
        address: storage
        for address, storage in storages.items()
        if not storage.resizable() or storage_use_count(address) > counts[address] + 1
    }
    if not held:
        return held
    known = {tensor.untyped_storage()._cdata for tensor in given if is_plain(tensor)}
    return {address: storage for address, storage in held.items() if address not in known}


def _saved_storages(nodes: Iterable[Any]) -> set[int]:
    """Return the addresses of all storages that a graph has saved tensors in."""
    found: set[int] = set()
    left, seen = list(nodes), {None}
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left.extend(following for following, _ in node.next_functions)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for each in saved if isinstance(saved, tuple | list) else (saved,):
                    tensor = _plainly_saved(each)
                    if tensor is not None:
                        found.add(tensor.untyped_storage()._cdata)
    return found


def _plainly_saved(saved: Any) -> torch.Tensor | None:
    """Return what was saved without a hook: one may run the layer again (torch's checkpoint)."""
    tensor = getattr(saved, "data", None)
    is_seen = isinstance(tensor, torch.Tensor) and is_plain(tensor)
    return tensor if is_seen and getattr(saved, "unpack_hook", saved) is None else None


def _copied(nest: N, held: Mapping[int, Any]) -> N:
    if not held:
        return nest
    own = [t for t in _tensors(nest) if is_plain(t) and t.untyped_storage()._cdata in held]
    copies = {
        id(tensor): copy.requires_grad_(tensor.requires_grad)
        for tensor, copy in zip(own, cloned([each.detach() for each in own]), strict=True)
    }

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return copies.get(id(tensor), tensor)

    return cast(N, nest.map(copied) if isinstance(nest, State) else map_tensors(copied, nest))
