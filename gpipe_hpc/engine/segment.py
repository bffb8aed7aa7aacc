"""Layers of a stage that are run, and recomputed, together."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from gpipe_hpc.comm.nests import Nest, flatten, unflatten
from gpipe_hpc.engine.backward.splitting import Deferred, DeferWeights
from gpipe_hpc.engine.loss import alone
from gpipe_hpc.engine.routes import State
from gpipe_hpc.engine.state.keyed import Keyed, LayerKey
from gpipe_hpc.engine.state.passage import EVALUATION, LayerState, Passage
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import Reports, SkipNames, reporting, run_layer

_NOTHING: Final = nullcontext()
_EVERY: Final = 4


def _alone(number: torch.Tensor | float) -> torch.Tensor | float:
    return alone(number) if isinstance(number, torch.Tensor) else number


class Noted(NamedTuple):
    """What one layer, by its global index, reported of one micro-batch."""

    layer: int
    reports: Reports

    def without_graph(self) -> "Noted":
        """Return the same numbers, held by no graph."""
        losses = {name: alone(total) for name, total in self.reports.losses.items()}
        metrics = {name: (_alone(s), _alone(w)) for name, (s, w) in self.reports.metrics.items()}
        return Noted(self.layer, replace(self.reports, losses=losses, metrics=metrics))


class Segment:
    """Consecutive layers of one stage, by global index.

    They run under random keys of their own, and never write into what they were given. `calls`:
    what to call in place of a layer. `states`: what is known of the state that layers change.
    """

    def __init__(
        self,
        stage: int,
        layers: Mapping[int, nn.Module],
        names: Mapping[int, SkipNames],
        keyed: Keyed,
        calls: Mapping[int, Callable[..., Any]],
        states: Mapping[int, LayerState],
    ) -> None:
        self._calls = calls
        self.states = {index: states[index] for index in layers}
        self._turns = 0
        self.layers = dict(layers)
        self._stage = stage
        self._names = {index: names.get(index, SkipNames()) for index in layers}
        self._indices = tuple(layers)
        self._places = {index: f"layers.{index}" for index in layers}
        self._keyed = keyed
        # By training mode (dropout writes in place in one only): whether the layers were seen
        # to leave the input alone.
        self._leaves_input_alone: dict[bool, bool] = {}

    def run(
        self,
        state: State,
        key: LayerKey,
        deferred: Deferred | None = None,
        passage: Passage = EVALUATION,
    ) -> tuple[State, list[Noted]]:
        """Run the layers; return what they make of `state`, and what they reported.

        `state` stays as it is: it may be needed for recomputation, and its storage may belong to
        the user or to another rank. `passage`: what to do about the state of layers themselves.
        """
        (nest, stashed), copies = self._protect(state)
        watched = [] if copies else state.tensors()
        versions = [tensor._version for tensor in watched]
        noted: list[Noted] = []
        splits = _NOTHING if deferred is None else DeferWeights(deferred)
        states, looks = list(self.states.values()), passage.looks
        draws = [each.draws for each in states]
        # Now and then one layer is looked at anew: it may have begun to draw from torch's.
        self._turns += 1
        turn = self._turns // _EVERY % len(states) if states and not self._turns % _EVERY else -1
        alone = self._keyed.alone(draws, passage.start(self._indices[0]) if states else None)
        with alone as drawing, reporting(Reports()) as reports, splits:
            for place, (index, layer) in enumerate(self.layers.items()):
                own = states[place]
                call = self._calls.get(index, layer)
                names = self._names[index]
                # What has no state, and is not looked at in this run, costs its seed alone.
                is_idle = place != turn and not looks and own.is_idle
                if is_idle:
                    drawing.seed_torchs(key(index))
                    seeded: AbstractContextManager[object] = _NOTHING
                else:
                    passage.begin(own)
                    seeded = own.seed(drawing, key(index), checks=place == turn)
                try:
                    with seeded:
                        nest = run_layer(call, names, nest, stashed, self._places[index])
                except Exception as error:
                    passage.fail(error)
                    error.add_note(f"layers.{index} ({type(layer).__name__})")
                    raise
                if not is_idle:
                    passage.end(own, nest, own.end(drawing))
                if reports:
                    noted.append(Noted(index, reports.take()))
        passage.close(states, drawing, self._keyed)
        if copies:
            self._leaves_input_alone[self._mode] = all(copy._version == 0 for copy in copies)
        elif versions != [tensor._version for tensor in watched]:
            raise ModelError(
                f"stage {self._stage} (layers {min(self.layers)} to {max(self.layers)}): a layer "
                f"wrote in place into the stage's input in this micro-batch, but not in the "
                f"first; use inplace=False there, or write in place always"
            )
        return State(nest, stashed), noted

    @property
    def place(self) -> tuple[tuple[int, ...], bool]:
        """Return what tells its runs from those of others: its layers, and the mode."""
        return self._indices, self._mode

    @property
    def _mode(self) -> bool:
        return any(layer.training for layer in self.layers.values())

    def _protect(self, state: State) -> tuple[State, list[torch.Tensor]]:
        """Copy the input's tensors where layers write into them; the first run finds out.

        Its containers are made anew always: a layer may put other values into a dict or list.
        """
        is_known = self._leaves_input_alone.get(self._mode)
        if is_known and isinstance(state.nest, torch.Tensor) and not state.stashed:
            return State(state.nest, {}), []
        leaves, tree = flatten(state)
        if is_known:
            return _state(unflatten(leaves, tree)), []
        copied = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        copies = [leaf for leaf in copied if isinstance(leaf, torch.Tensor)]
        return _state(unflatten(copied, tree)), copies


def _state(nest: Nest) -> State:
    assert isinstance(nest, State), f"expected a State, got {type(nest).__name__}"
    return nest
