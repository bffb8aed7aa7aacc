"""What a stage does with one micro-batch, and what it keeps of it between its actions."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_hpc.comm.nests import Nest, map_tensors, tensors_of
from gpipe_hpc.comm.transport import Message
from gpipe_hpc.engine.precision import casting
from gpipe_hpc.engine.splitting import Deferred, deferring
from gpipe_hpc.engine.stage import LayerKey, Stage

Gradients = Sequence[torch.Tensor | None]


class Keep(Enum):
    """What a forward leaves behind for the backward."""

    NOTHING = "nothing"  # evaluation
    INPUT = "input"  # the boundary alone: an R will make the rest
    GRAPH = "graph"  # everything autograd saved


class Recipe(NamedTuple):
    """How a stage's forward of one micro-batch prepares its backward."""

    keep: Keep
    splits: bool = False  # the backward comes as I and W


class Start(NamedTuple):
    """Where backward begins on the last stage: a scalar and its gradient."""

    total: torch.Tensor
    gradient: torch.Tensor


Finish = Callable[[int, Nest, int, bool], Start | None]
"""Takes (micro-batch, output, samples, is this a recomputation) at the end of the last stage."""


class _Kept(NamedTuple):
    boundary: Nest  # None once nothing will be recomputed from it
    leaves: list[torch.Tensor]  # the boundary's tensors that require a gradient
    edges: list[GradientEdge | None]  # where backward enters, one for each gradient to come
    start: torch.Tensor | None  # the gradient of the loss, on the last stage
    num_samples: int
    deferred: Deferred | None  # where I leaves the weight gradients for W


_EMPTY = _Kept(None, [], [], None, 0, None)


class StageWork:
    """Run F, R, B, I and W of one stage. `finish` is called at the end of the last stage's layers.

    An empty micro-batch (no samples) calls no layer and adds nothing.
    """

    def __init__(self, stage: Stage, finish: Finish | None) -> None:
        self.stage = stage
        self._finish = finish
        self._kept: dict[int, _Kept] = {}
        self._deferred: dict[int, Deferred] = {}

    @property
    def num_kept(self) -> int:
        """Return how many micro-batches something is kept of."""
        return len(self._kept) + len(self._deferred)

    def forward(self, microbatch: int, message: Message, key: LayerKey, recipe: Recipe) -> Nest:
        """Run the layers; return the output, whose requires_grad says what B will be given."""
        boundary, num_samples = message
        keep = recipe.keep
        if num_samples == 0:
            if keep is not Keep.NOTHING:
                self._kept[microbatch] = _EMPTY
            return None
        leaves = _differentiable(boundary)
        deferred = Deferred() if recipe.splits else None
        with torch.set_grad_enabled(keep is Keep.GRAPH), deferring(deferred), self._casting():
            output = self.stage.run(boundary, key)
            start = self._end(microbatch, output, num_samples, again=False)
        if keep is Keep.NOTHING:
            return output
        edges: list[GradientEdge | None] = []
        if keep is Keep.INPUT:
            # No graph tells yet which outputs depend on a parameter: take it that all may.
            output = _mark(output, bool(leaves) or self.stage.is_trained)
        else:
            edges = self._edges(output, start)
            boundary = None
        gradient = None if start is None else start.gradient
        self._kept[microbatch] = _Kept(boundary, leaves, edges, gradient, num_samples, deferred)
        return output

    def recompute(self, microbatch: int, key: LayerKey) -> bool:
        """Run the layers again, this time for the graph; False if there was nothing to do."""
        kept = self._kept[microbatch]
        if kept.num_samples == 0:
            return False
        with torch.enable_grad(), deferring(kept.deferred), self._casting():
            output = self.stage.run(kept.boundary, key)
            start = self._end(microbatch, output, kept.num_samples, again=True)
        if start is None:
            marked = bool(kept.leaves) or self.stage.is_trained
            edges = [_edge(t) for t in tensors_of(output) if marked and _may_require(t)]
        else:
            edges = self._edges(output, start)
        self._kept[microbatch] = kept._replace(boundary=None, edges=edges)
        return True

    def backward(self, microbatch: int, gradients: Gradients) -> Message:
        """Run B or I: accumulate parameter gradients; return those of the boundary's leaves.

        After a forward that splits, most parameter gradients are left to `weights`.
        `gradients`: one for each output that required a gradient; ignored on the last stage.
        """
        kept = self._kept.pop(microbatch)
        if kept.start is not None:
            gradients = [kept.start]
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(kept.edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if pairs:
            edges, given = zip(*pairs, strict=True)
            torch.autograd.backward(edges, given)
        if kept.deferred:
            self._deferred[microbatch] = kept.deferred
        return Message(tuple(leaf.grad for leaf in kept.leaves), kept.num_samples)

    def weights(self, microbatch: int) -> bool:
        """Run W; False if there was nothing left to do."""
        deferred = self._deferred.pop(microbatch, None)
        if deferred is not None:
            deferred.run()
        return deferred is not None

    def _casting(self) -> AbstractContextManager[object]:
        return casting(self.stage.precision, self.stage.device)

    def _end(self, microbatch: int, output: Nest, num_samples: int, again: bool) -> Start | None:
        if self._finish is None:
            return None
        return self._finish(microbatch, output, num_samples, again)

    def _edges(self, output: Nest, start: Start | None) -> list[GradientEdge | None]:
        # An edge instead of the tensor: the output's own memory is free once it has left.
        if start is not None:
            return [_edge(start.total)]
        return [_edge(tensor) for tensor in _differentiable(output)]


def _edge(tensor: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _differentiable(nest: Nest) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(nest) if tensor.requires_grad]


def _may_require(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mark(output: Nest, value: bool) -> Nest:
    return map_tensors(lambda t: t.detach().requires_grad_(value) if _may_require(t) else t, output)
