"""Layers of a stage that are run, and recomputed, together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpipe_hpc.comm.aliases import cloned, is_buffer, is_plain, mark_buffer, shared_blocks
from gpipe_hpc.comm.nests import Nest, flatten, unflatten
from gpipe_hpc.engine.stages.routes import State
from gpipe_hpc.engine.state.keyed import Keyed
from gpipe_hpc.engine.state.layer import LayerState, Roll
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import SkipNames, run_layer


class PlacedLayer:
    """One layer in its place: its global index, its skips, and its state.

    `call`: what runs it, the module itself or what it was compiled to.
    """

    __slots__ = ("_names", "_place", "call", "has_skips", "index", "state")

    def __init__(
        self, index: int, call: Callable[..., Any], state: LayerState, names: SkipNames
    ) -> None:
        self.index, self.call, self.state = index, call, state
        self._names, self._place = names, f"layers.{index}"
        self.has_skips = bool(names.stashes or names.pops)

    @property
    def where(self) -> str:
        """Return its name in messages."""
        return self.state.where

    def with_skips(self, stashed: dict[str, Nest]) -> Callable[[Nest], Nest]:
        """Return what runs it on a nest; its pops leave `stashed`, its stashes come into it."""
        return lambda nest: run_layer(self.call, self._names, nest, stashed, self._place)


class Segment:
    """Consecutive layers of one stage, in their order; a stage may have none.

    They never write into what they are given. The loss may run behind them, as one layer more.
    """

    def __init__(self, stage: int, layers: Sequence[PlacedLayer], keyed: Keyed) -> None:
        self.layers = tuple(layers)
        self._stage, self._keyed = stage, keyed
        self.states = tuple(layer.state for layer in layers)
        self._roll = self._roll_with_loss = Roll(self.states, keyed)
        self._indices = tuple(layer.index for layer in layers)
        # By training mode (dropout writes in place in one only): whether the layers were seen
        # to leave the input alone.
        self._leaves_input_alone: dict[bool, bool] = {}

    @property
    def where(self) -> str:
        """Return its name in messages."""
        if not self._indices:
            return f"stage {self._stage}"
        return f"stage {self._stage} (layers {self._indices[0]} to {self._indices[-1]})"

    @property
    def place(self) -> tuple[tuple[int, ...], bool]:
        """Return what tells its runs from those of others: its layers, and the mode."""
        return self._indices, any(state.layer.training for state in self.states)

    def roll(self, loss: LayerState | None = None) -> Roll:
        """Return which layers have state; `loss`: that of the loss, if it runs behind them."""
        if loss is None:
            return self._roll
        if loss not in self._roll_with_loss.states:
            self._roll_with_loss = Roll([*self.states, loss], self._keyed)
        return self._roll_with_loss

    def protect(self, state: State, modes: Sequence[bool]) -> tuple[State, "Watch"]:
        """Return what the layers may run on in place of `state`, and what tells if they write.

        `state` stays as it is: it may be needed for recomputation, and its storage may belong to
        the user or to another rank. So its tensors are copied where layers write into them; the
        first run finds out. Its containers are made anew always: a layer may put other values into
        a dict or list. `modes`: whether each layer is in training.
        """
        mode = any(modes[: len(self.layers)])
        is_known = self._leaves_input_alone.get(mode)
        if is_known and isinstance(state.nest, torch.Tensor) and not state.stashed:
            return State(_with_node(state.nest), {}), Watch(mode, [state.nest], is_copy=False)
        leaves, tree = flatten(state)
        given = state.tensors()
        if is_known:
            own = {id(tensor): _with_node(tensor) for tensor in given}
            viewed = [own.get(id(leaf), leaf) for leaf in leaves]
            return _state(unflatten(viewed, tree)), Watch(mode, given, is_copy=False)
        copies = cloned(given)
        own = {id(tensor): copy for tensor, copy in zip(given, copies, strict=True)}
        copied = [own.get(id(leaf), leaf) for leaf in leaves]
        buffers = [place for place, tensor in enumerate(given) if is_buffer(tensor)]
        for place in buffers:
            mark_buffer(copies[place])  # layers may hand it on
        watch = Watch(mode, copies, is_copy=True, buffers=buffers, originals=given)
        return _state(unflatten(copied, tree)), watch

    def learn(self, watch: "Watch") -> None:
        """Take notice of whether the layers wrote into what they were given.

        Raises ModelError if they did so for the first time, and it was no copy.
        """
        if watch.is_copy and watch.tensors:
            if watch.is_training not in self._leaves_input_alone:
                writes = watch.shows_writes() or watch.has_other_values()
                self._leaves_input_alone[watch.is_training] = not writes
        elif watch.shows_writes():
            raise ModelError(
                f"{self.where}: a layer wrote in place into the "
                f"stage's input in this micro-batch, but not in the first; use inplace=False "
                f"there, or write in place always"
            )

    def refuse_shared(self, watch: "Watch", layer: PlacedLayer) -> None:
        """Raise ModelError if a layer has written into what others hold, too.

        Into one of several views of one memory, or into the buffer of a layer.
        """
        first = self._indices[0]
        source = f"output of layers.{first - 1}" if first else "batch"
        for written in watch.written_buffers():
            raise ModelError(
                f"{layer.where}: wrote in place into tensor {written} of the {source}, which lies "
                f"in a buffer or a frozen parameter of an earlier layer; a write does not reach "
                f"that layer if the model is cut between the two. Use inplace=False here, or let "
                f"the earlier layer return a copy (clone)"
            )
        found = watch.written_together()
        if found is None:
            return
        written, others = found
        listed = ", ".join(map(str, others))
        raise ModelError(
            f"{layer.where}: wrote in place into tensor {written} of the {source}, which shares "
            f"memory with tensor {listed} of it; the write would reach only one of them where the "
            f"model is cut in between. Use inplace=False there, or let the layer before return "
            f"tensors of their own (clone)"
        )


class Watch:
    """The tensors that layers were given, and how often each had been written to before.

    `buffers`: positions of those that lie in a buffer of another layer. `shares_memory`: copies of
    such ones, or of different tensors that have elements in common. `originals`: of the copies.
    """

    __slots__ = (
        "_buffers",
        "_originals",
        "_versions",
        "is_copy",
        "is_training",
        "shares_memory",
        "tensors",
    )

    def __init__(
        self,
        is_training: bool,
        tensors: Sequence[torch.Tensor],
        *,
        is_copy: bool,
        buffers: Sequence[int] = (),
        originals: Sequence[torch.Tensor] = (),
    ) -> None:
        self.is_training, self.tensors, self.is_copy = is_training, tensors, is_copy
        self._buffers, self._originals = buffers, originals
        self._versions = [tensor._version for tensor in tensors]
        self.shares_memory = is_copy and (
            bool(buffers) or (len(tensors) > 1 and bool(shared_blocks(tensors)))
        )

    def shows_writes(self) -> bool:
        """Say whether any was written to since."""
        return self._versions != [tensor._version for tensor in self.tensors]

    def has_other_values(self) -> bool:
        """Return whether the copies differ from their originals.

        Writes by `.data` or NumPy change no version, so values are compared.
        """
        with torch.no_grad():
            return any(
                type(copy) is torch.Tensor and is_plain(copy) and not _are_equal(copy, original)
                for copy, original in zip(self.tensors, self._originals, strict=True)
            )

    def written_buffers(self) -> list[int]:
        """Return which buffers were written to, by position."""
        return [at for at in self._buffers if self.tensors[at]._version != self._versions[at]]

    def written_together(self) -> tuple[int, list[int]] | None:
        """Return a tensor that was written to, by position, and those it shares memory with."""
        pairs = zip(self.tensors, self._versions, strict=True)
        written = {place for place, (tensor, v) in enumerate(pairs) if tensor._version != v}
        for block in shared_blocks(self.tensors):
            for place in written & block.views.keys():
                return place, [other for other in block.views if other != place]
        return None


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _with_node(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a `grad_fn` if it requires a gradient: layers put hooks on that."""
    has_none = tensor.requires_grad and tensor.is_leaf and is_plain(tensor)
    return tensor.view_as(tensor) if has_none and torch.is_grad_enabled() else tensor


def _state(nest: Nest) -> State:
    assert isinstance(nest, State), f"expected a State, got {type(nest).__name__}"
    return nest
