"""Outputs of a stage: in memory of their own, and with the right `requires_grad`.

**Memory.** A layer may keep its output and write into it again, as scratch memory for the next
micro-batch or as a running value. In an unpartitioned model this has no effect; here the output may
still be in transfer to another rank, or be kept there for a recomputation. So an output is copied
if anything else refers to its memory. Most layers keep nothing, and nothing is copied.

**Gradients.** Layers that will be recomputed run forward without a graph, and yet `requires_grad`
of their outputs must be right: a mask, or an output that was detached, requires no gradient. So the
first forward of each kind builds a graph, reads the flags, and drops it. If all tensors that the
layers created require a gradient, later forwards need no graph; inputs that they only pass on keep
their flags. If some tensor does not require one, that may depend on values, so these forwards
always build a graph.
"""

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from gpipe_hpc.comm.transport.aliases import (
    cloned,
    is_buffer,
    is_plain,
    mark_buffer,
    storages_of,
)
from gpipe_hpc.engine.backward import reachable_nodes
from gpipe_hpc.engine.inputs import State
from gpipe_hpc.engine.layer_runner import LayerRunner
from gpipe_hpc.errors import ModelError
from gpipe_hpc.pytree import map_tensors, tensors_of
from gpipe_hpc.torch_compat import storage_use_count

log = logging.getLogger("gpipe_hpc.pipeline")

N = TypeVar("N")

REQUIRES_GRAD: Final = attrgetter("requires_grad")

Kind = tuple[Hashable, ...]
"""A kind of run: its layers and their mode, then which of its inputs require a gradient."""


def copy_if_shared(nest: N, given: Iterable[torch.Tensor]) -> N:
    """Return a nest of detached tensors, copied if other tensors refer to their memory.

    Memory of the inputs `given` may be passed on: the stage that produced them has checked it. Only
    the caller and `nest` may refer to the tensors themselves.
    """
    return _copied(nest, _held_elsewhere(_tensors(nest), given))


def copy_unless_saved(
    state: State,
    given: Iterable[torch.Tensor],
    place: Hashable,
    ends: Iterable[GradientEdge | None],
    known: dict[Hashable, list[bool]],
) -> State:
    """Return the same as `copy_if_shared`, but without copies of outputs that the graph has saved.

    The graph may refer to an output too: tanh saves its output. Such an output needs no copy, as
    autograd itself refuses a backward through memory that was written to.

    Args:
        state: The outputs.
        given: The inputs.
        place: A key for the layers.
        ends: Where a backward enters the graph.
        known: By place and number of outputs, which of them the graph has saved; added to here, so
            that the graph is searched once for each place.
    """
    tensors = state.tensors()
    held = _held_elsewhere(tensors, given)
    if not held:
        return state
    key = (place, len(tensors))
    if key not in known:
        found = _saved_storages(edge.node for edge in ends if edge is not None)
        known[key] = [is_plain(t) and t.untyped_storage()._cdata in found for t in tensors]
    for tensor, is_saved in zip(tensors, known[key], strict=True):
        # Autograd does not detect writes into memory that torch did not allocate.
        if is_saved and tensor.untyped_storage().resizable():
            held.pop(tensor.untyped_storage()._cdata, None)
    return _copied(state, held)


def places_in_buffers(state: State, buffers: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of the tensors whose memory is that of a buffer, also of earlier stages.

    Empty if there is only one tensor, as later layers never write to that.
    """
    tensors = state.tensors()
    if len(tensors) < 2:
        return []
    held = storages_of(buffers)
    return [p for p, each in enumerate(tensors) if is_buffer(each) or held & storages_of([each])]


def with_marks(state: State, buffers: Sequence[int]) -> State:
    """Mark tensors at positions `buffers` as memory of a buffer, unless they require a gradient."""
    tensors = state.tensors() if buffers else []
    for place in buffers:
        if not tensors[place].requires_grad:
            mark_buffer(tensors[place])
    return state


def refuse_subclasses(left: State, where: str) -> None:
    """Raise ModelError for outputs of a tensor subclass, which would arrive as plain tensors.

    Checked before outputs are detached, as not every subclass survives that.
    """
    for tensor in left.tensors():
        kind = type(tensor)
        is_base = kind is torch.Tensor or kind is nn.Parameter
        if not is_base and not tensor.is_nested:  # the boundary raises for nested tensors
            raise ModelError(
                f"{where}: expected plain tensors for the stages of other ranks, got a "
                f"{kind.__module__}.{kind.__qualname__} of shape {tuple(tensor.shape)}, which "
                f"would arrive as a torch.Tensor and lose its class; let the layer return "
                f"tensor.as_subclass(torch.Tensor), or put the layers that need the class into "
                f"one stage"
            )


def _tensors(nest: Any) -> list[torch.Tensor]:
    return nest.tensors() if isinstance(nest, State) else tensors_of(nest)


def _held_elsewhere(
    tensors: Sequence[torch.Tensor], given: Iterable[torch.Tensor]
) -> dict[int, Any]:
    """Return the storages, by address, that other tensors than `tensors` and `given` refer to."""
    storages: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for tensor in tensors:
        if is_plain(tensor):
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
            counts[storage._cdata] = counts.get(storage._cdata, 0) + 1
            del storage
    # References to memory that torch did not allocate (NumPy's) are unknown. `storages` itself
    # holds one more reference.
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
    """Return the addresses of all storages of tensors that a graph has saved."""
    found: set[int] = set()
    for node in reachable_nodes(nodes):
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for each in saved if isinstance(saved, tuple | list) else (saved,):
                    tensor = _plainly_saved(each)
                    if tensor is not None:
                        found.add(tensor.untyped_storage()._cdata)
    return found


def _plainly_saved(saved: Any) -> torch.Tensor | None:
    """Return a saved tensor; None if a hook has saved it, which may run a layer again."""
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


class RequiresGradTracker:
    """Predicts which outputs of a forward without a graph require a gradient."""

    def __init__(self) -> None:
        self._trained: list[bool] = []
        # Kinds of runs in which all created tensors required a gradient so far: they need no graph.
        self.all_require: set[Kind] = set()
        self._last: dict[Kind, list[bool]] = {}  # the flags that the last graph of a kind showed
        self._varying: set[Hashable] = set()  # places where flags have changed between runs

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin a step; discard what is known if parameters were frozen or unfrozen."""
        trained = [parameter.requires_grad for parameter in parameters]
        if trained != self._trained:
            self._trained = trained
            self.all_require.clear()
            self._last.clear()

    def flags(
        self,
        kind: Kind,
        given: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        *,
        has_graph: bool,
    ) -> list[bool]:
        """Return whether each output requires a gradient; `given` are the inputs."""
        own = {id(tensor): tensor.requires_grad for tensor in given}
        if not has_graph:
            return [
                own.get(id(each), each.is_floating_point() or each.is_complex()) for each in tensors
            ]
        flags, place = [tensor.requires_grad for tensor in tensors], kind[0]
        if self._last.setdefault(kind, flags) != flags:
            self._varying.add(place)
        new = [tensor for tensor in tensors if id(tensor) not in own]
        made = [tensor for tensor in new if tensor.is_floating_point() or tensor.is_complex()]
        if all(tensor.requires_grad for tensor in made) and place not in self._varying:
            self.all_require.add(kind)
        return flags

    def keep(
        self, runner: LayerRunner, promised: Sequence[bool], left: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the recomputed outputs `left` that get a gradient; None if one requires none.

        `promised`: whether each output of the forward required a gradient. Raises ModelError if an
        output requires one that was not promised.
        """
        if len(left) != len(promised):
            raise ModelError(
                f"{_last(runner)}: the recomputation returned {len(left)} tensors, expected "
                f"{len(promised)}, as in the forward; let outputs depend on input and parameters "
                f"only, or use recompute=never"
            )
        found: list[torch.Tensor | None] = []
        for tensor, is_promised in zip(left, promised, strict=True):
            if tensor.requires_grad and not is_promised:
                raise ModelError(
                    f"{_last(runner)}: an output of shape {tuple(tensor.shape)} requires a "
                    f"gradient in the recomputation, but did not in the forward; detach it in "
                    f"both, depending on input and parameters only, or use recompute=never"
                )
            if is_promised:
                found.append(tensor if tensor.requires_grad else None)
                if not tensor.requires_grad:
                    self._found_varying(runner)
        return found

    def _found_varying(self, runner: LayerRunner) -> None:
        if runner.place in self._varying:
            return
        log.warning(
            "%s: an output requires a gradient for some micro-batches only. It gets none in this "
            "one, which is correct. From now on these layers' forwards build a graph to find out "
            "whether it does; recompute=never avoids that",
            _last(runner),
        )
        self._varying.add(runner.place)
        self.all_require = {kind for kind in self.all_require if kind[0] != runner.place}


def _last(runner: LayerRunner) -> str:
    """Return the name of a runner's last layer."""
    return runner.layers[-1].where
