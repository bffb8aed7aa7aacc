"""Record the outputs of layers as hashes, to find the first tensor that two trainings differ in."""

import hashlib
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.pytree import Nest, tensors_of
from gpipe_hpc.schedule import Action, Op


class TensorKind(IntEnum):
    """The kind of a recorded tensor, in the order in which a difference propagates."""

    OUTPUT = 0
    OUTPUT_AGAIN = 1
    GRADIENT = 2


WORDS: Final = {
    TensorKind.OUTPUT: "its output",
    TensorKind.OUTPUT_AGAIN: "its output when it was recomputed (R)",
    TensorKind.GRADIENT: "the gradient of its output",
}


class TensorPlace(NamedTuple):
    """Identifier of a recorded tensor; `tensor` is its index within the output of the layer."""

    kind: TensorKind
    microbatch: int
    layer: int
    tensor: int


class RecordedTensor(NamedTuple):
    """A recorded tensor: a hash of its bits, and its norm and shape for messages."""

    digest: str
    norm: float
    shape: tuple[int, ...]


class Observations:
    """The recorded tensors of one step."""

    def __init__(self) -> None:
        self.seen: dict[TensorPlace, RecordedTensor] = {}

    def watch(self, kind: TensorKind, layer: int, microbatch: int, output: Nest) -> None:
        """Record a layer's output now, and its gradient when the backward computes it."""
        for number, tensor in enumerate(tensors_of(output)):
            self.seen[TensorPlace(kind, microbatch, layer, number)] = _seen(tensor)
            if tensor.requires_grad:
                place = TensorPlace(TensorKind.GRADIENT, microbatch, layer, number)
                register: Any = tensor.register_hook  # untyped in torch
                register(partial(self._note, place))

    def _note(self, place: TensorPlace, gradient: Tensor) -> None:
        self.seen[place] = _seen(gradient)


def watch_pipeline(pipe: Pipeline) -> Observations:
    """Record the outputs of every layer of a rank from now on.

    The index of the micro-batch is read from the current activity of the world.
    """
    found = Observations()
    first = pipe.microbatches.start
    for stage in pipe.stages.values():
        for index, layer in stage.layers.items():
            layer.register_forward_hook(_hook(pipe, found, index, first))
    return found


def _hook(
    pipe: Pipeline, found: Observations, layer: int, first: int
) -> Callable[[nn.Module, Any, Any], None]:
    def note(module: nn.Module, given: Any, output: Any) -> None:
        action = pipe.world.activity
        if isinstance(action, Action) and action.microbatch is not None:
            kind = TensorKind.OUTPUT_AGAIN if action.op is Op.R else TensorKind.OUTPUT
            if action.op in (Op.F, Op.R):
                found.watch(kind, layer, first + action.microbatch, output)

    return note


def first_difference(
    ours: Observations, plain: Observations
) -> tuple[TensorPlace, RecordedTensor, RecordedTensor] | None:
    """Return the first differing tensor with both recordings, or None if none differs.

    Forwards come first, by micro-batch and layer; then recomputations, each compared with the plain
    forward; then gradients, from the last layer to the first.
    """
    differing = []
    for place, seen in ours.seen.items():
        kind = TensorKind.OUTPUT if place.kind is TensorKind.OUTPUT_AGAIN else place.kind
        theirs = plain.seen.get(place._replace(kind=kind))
        if theirs is not None and theirs.digest != seen.digest:
            differing.append((place, seen, theirs))
    return min(differing, key=lambda each: _rank_of(each[0]), default=None)


def _rank_of(place: TensorPlace) -> tuple[int, ...]:
    layer = -place.layer if place.kind is TensorKind.GRADIENT else place.layer
    return place.kind, place.microbatch, layer, place.tensor


def _seen(tensor: Tensor) -> RecordedTensor:
    # Adding 0 turns -0.0 into 0.0, which are equal.
    own = tensor.detach()
    own = (own.to_dense() if own.is_sparse else own).cpu().resolve_conj().resolve_neg()
    own = (
        (own + 0).contiguous() if own.is_floating_point() or own.is_complex() else own.contiguous()
    )
    raw = own.reshape(-1).view(torch.uint8) if own.numel() else own.new_empty(0, dtype=torch.uint8)
    norm = float(own.to(torch.complex128).abs().square().sum().sqrt())
    return RecordedTensor(
        hashlib.blake2b(raw.numpy().tobytes()).hexdigest(), norm, tuple(own.shape)
    )
