"""What a forward without a graph says of its outputs: which require a gradient.

Layers that will be recomputed run forward without a graph, and yet the next stage shall see of a
boundary what it would see in one piece: a mask, or an output that was detached, requires none.
So the first forward of each kind makes a graph, which tells, and drops it. Where all that layers
made requires a gradient the next ones go without; what they only pass on keeps its own mark.
Where something does not, it may do so with the values: those forwards make a graph every time.
"""

import logging
from collections.abc import Hashable, Iterable, Sequence

import torch

from gpipe_hpc.engine.layers.segment import Segment
from gpipe_hpc.engine.stages.routes import State
from gpipe_hpc.errors import ModelError

log = logging.getLogger("gpipe_hpc.pipeline")


class Promises:
    """What is known of the outputs of a stage's segments."""

    def __init__(self) -> None:
        self._trained: list[bool] = []
        # Kinds of runs of which every tensor made requires a gradient, as far as was seen.
        self._all_require: set[tuple[Hashable, ...]] = set()
        self._last: dict[tuple[Hashable, ...], list[bool]] = {}  # what a graph told of each kind
        self._varying: set[Hashable] = set()  # places where that was seen to change

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin a step; forget everything if parameters were frozen or unfrozen."""
        trained = [parameter.requires_grad for parameter in parameters]
        if trained != self._trained:
            self._trained = trained
            self._all_require.clear()
            self._last.clear()

    def needs_graph(self, segment: Segment, given: State) -> bool:
        """Say whether a forward from this state must make a graph, to tell."""
        return _kind(segment, given) not in self._all_require

    def flags(self, segment: Segment, given: State, left: State, has_graph: bool) -> list[bool]:
        """Return of each tensor in `left` whether it requires a gradient."""
        own = {id(tensor): tensor.requires_grad for tensor in given.tensors()}
        tensors = left.tensors()
        if not has_graph:
            return [own.get(id(tensor), may_require(tensor)) for tensor in tensors]
        flags, kind = [tensor.requires_grad for tensor in tensors], _kind(segment, given)
        if self._last.setdefault(kind, flags) != flags:
            self._varying.add(segment.place)
        made = [tensor for tensor in tensors if id(tensor) not in own and may_require(tensor)]
        if all(tensor.requires_grad for tensor in made) and segment.place not in self._varying:
            self._all_require.add(kind)
        return flags

    def keep(
        self, segment: Segment, promised: Sequence[bool], left: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the recomputed tensors that a gradient comes for, None for one that needs none.

        Raises ModelError where one was not asked for and is needed.
        """
        if len(left) != len(promised):
            raise ModelError(
                f"{_last(segment)}: expected {len(promised)} tensors from the recomputation, as "
                f"in the forward, got {len(left)}; what a layer returns may depend on its input "
                f"and parameters alone, or use recompute=never"
            )
        found: list[torch.Tensor | None] = []
        for tensor, is_promised in zip(left, promised, strict=True):
            if tensor.requires_grad and not is_promised:
                raise ModelError(
                    f"{_last(segment)}: an output of shape {tuple(tensor.shape)} requires a "
                    f"gradient in the recomputation, expected none, as in the forward; whether a "
                    f"layer detaches may depend on its input and parameters alone, or use "
                    f"recompute=never"
                )
            if is_promised:
                found.append(tensor if tensor.requires_grad else None)
                if not tensor.requires_grad:
                    self._found_varying(segment)
        return found

    def _found_varying(self, segment: Segment) -> None:
        if segment.place in self._varying:
            return
        log.warning(
            "%s: an output requires a gradient for some micro-batches and none for others, and "
            "said it did; its gradient is left out, as it should be. From now on its forwards "
            "make a graph, to tell; recompute=never needs no such thing",
            _last(segment),
        )
        self._varying.add(segment.place)
        self._all_require = {kind for kind in self._all_require if kind[0] != segment.place}


def may_require(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is of a dtype that has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _kind(segment: Segment, given: State) -> tuple[Hashable, ...]:
    return segment.place, *(tensor.requires_grad for tensor in given.tensors())


def _last(segment: Segment) -> str:
    """Name the layer whose output leaves a segment."""
    return segment.layers[-1].where
