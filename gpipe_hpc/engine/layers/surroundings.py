"""What surrounds the layers of a stage, and the loss, while they run on one micro-batch."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.nests import Nest
from gpipe_hpc.engine.backward.splitting import Deferred, DeferWeights
from gpipe_hpc.engine.layers.precision import StageCasts, forget_detached_casts
from gpipe_hpc.engine.layers.segment import Segment
from gpipe_hpc.engine.memory.offload import HostCopy
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.engine.state.backward_draws import BackwardDraws
from gpipe_hpc.engine.state.keyed import Keyed
from gpipe_hpc.engine.state.layer import LayerState, Roll
from gpipe_hpc.engine.state.passage import Passage
from gpipe_hpc.models import Reports, SumOver, normalising_together, reporting


class Manner(NamedTuple):
    """How layers run.

    `passage`: what to do about the state that they change. `deferred`: what takes the gradients of
    their weights in place of autograd. `collector`: what takes hold of all that autograd saves.
    """

    passage: Passage
    has_graph: bool = False
    shares_casts: bool = True
    deferred: Deferred | None = None
    collector: HostCopy | None = None


class Surroundings:
    """Makes the blocks that layers of a stage run in; a block that is not needed costs nothing.

    Always: the mode of autograd, generators of random numbers seeded for each layer, and what takes
    reports. By the settings: casts, what normalises with other ranks, and the host's memory; by
    layer: its buffers, and generators besides torch's. `peers`: the ranks that BatchNorm layers
    normalise a micro-batch with.
    """

    def __init__(self, stage: Stage, parameters: Iterable[nn.Parameter], peers: Group | None):
        self._stage, self._keyed, self._peers = stage, stage.keyed, peers
        self.casts = stage.precision != "float32"
        self._casts = StageCasts(stage.precision, stage.device, parameters)
        self._is_plain = not self.casts and peers is None
        self._draws = BackwardDraws(stage.keyed.generators, stage.whole)

    def begin(self) -> None:
        """Begin a step, or an evaluation."""
        self._casts.begin()
        self._keyed.begin()
        self._draws.begin()

    def around(self, segment: Segment, roll: Roll, manner: Manner) -> "Inside":
        """Return the block for one run of a segment, and of what else is on the roll."""
        forget_detached_casts()
        if self._is_plain and manner.collector is None:
            return Inside(self._keyed, roll, manner, ())
        blocks: list[AbstractContextManager[object]] = []
        if manner.collector is not None:
            blocks.append(manner.collector.collecting())
        if self.casts:
            blocks.append(self._casts.block(segment.place, shared=manner.shares_casts))
        if self._peers is not None:
            blocks.append(normalising_together(self._sum_over_peers))
        return Inside(self._keyed, roll, manner, blocks)

    def backward(self, segment: Segment) -> AbstractContextManager[object]:
        """Return the block for a backward of a segment: it may draw no random numbers."""
        block = self._keyed.backward(lets_go=self._peers is not None)
        if not self._draws.looks:
            return block
        blocks = ExitStack()
        blocks.enter_context(block)
        blocks.enter_context(self._draws.refused(segment))
        return blocks

    def weight_gradients(self, segment: Segment) -> AbstractContextManager[object]:
        """Return the block for a W: hooks of parameters may draw no random numbers there."""
        return self._draws.refused_in_weights(segment)

    def end(self) -> None:
        """End a step that has not failed. Raises ModelError if a backward drew random numbers."""
        self._draws.end()

    @cached_property
    def _sum_over_peers(self) -> SumOver:
        """Return how BatchNorm sums over peers; a compiler must not trace a collective."""
        peers = self._peers
        assert peers is not None, "asked for only where there are peers"

        def sum_over_peers(tensor: torch.Tensor) -> None:
            with self._keyed.let_go():
                peers.all_reduce(tensor)

        if not self._stage.is_compiled:
            return sum_over_peers
        untraced: Callable[[Any], Any] = torch.compiler.disable
        return cast(SumOver, untraced(sum_over_peers))


class Inside:
    """The block within which layers run once: `enter` and `leave` go around each of them."""

    __slots__ = (
        "_blocks",
        "_deferred",
        "_drawing",
        "_grad_mode",
        "_has_graph",
        "_keyed",
        "_looks",
        "_opened",
        "_passage",
        "_reporting",
        "_roll",
        "_splits",
        "reports",
    )

    def __init__(
        self,
        keyed: Keyed,
        roll: Roll,
        manner: Manner,
        blocks: Iterable[AbstractContextManager[object]],
    ) -> None:
        self._keyed, self._roll, self._blocks = keyed, roll, blocks
        self._passage, self._has_graph, _, self._deferred, _ = manner
        self._looks = self._passage.looks
        start = self._passage.start(roll.states[0].index) if roll.states else None
        self._drawing = keyed.alone(roll.known, start)
        self.reports = Reports()
        self._reporting = reporting(self.reports)
        self._opened: ExitStack | None = None
        self._splits: Any = None

    def __enter__(self) -> "Inside":
        """Open everything."""
        self._grad_mode = torch.set_grad_enabled(self._has_graph)
        try:
            if self._blocks:
                self._opened = ExitStack()
                for block in self._blocks:
                    self._opened.enter_context(block)
            self._drawing.__enter__()
        except BaseException:
            self._close_blocks()
            raise
        self._reporting.__enter__()
        if self._deferred is not None:
            self._deferred.is_in_forward = True
            self._splits = DeferWeights(self._deferred)
            self._splits.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Close it, the last first."""
        try:
            self.end_layers()
            if self._deferred is not None:
                self._deferred.is_in_forward = False
            self._reporting.__exit__(*error)
            self._drawing.__exit__(*error)
            if error[0] is None:
                self._passage.close(self._roll.states, self._drawing, self._keyed)
        finally:
            self._close_blocks(*error)

    def _close_blocks(self, *error: Any) -> None:
        try:
            if self._opened is not None:
                self._opened.__exit__(*(error or (None, None, None)))
        finally:
            self._grad_mode.__exit__(None, None, None)

    def end_layers(self) -> None:
        """Leave what is for layers alone: what splits their backward is not for the loss."""
        splits, self._splits = self._splits, None
        if splits is not None:
            splits.__exit__(None, None, None)

    def enter(self, place: int, key: int) -> AbstractContextManager[object] | None:
        """Seed for the layer at a place of the roll; return the block to run it in.

        None for one that has no state and is not looked at: nobody need `leave` it.
        """
        roll = self._roll
        checks = place == roll.turn
        if roll.idle[place] and not (checks or self._looks):
            for generator in self._keyed.generators:
                generator.manual_seed(key)
            return None
        state = roll.states[place]
        self._passage.begin(state)
        return state.seed(self._drawing, key, checks=checks)

    def leave(self, place: int, output: Nest) -> None:
        """Take notice of what a layer has made."""
        state: LayerState = self._roll.states[place]
        self._passage.end(state, output, state.end(self._drawing))

    def fail(self, error: Exception) -> None:
        """Put back what a layer that has failed would have put back."""
        self._passage.fail(error)
