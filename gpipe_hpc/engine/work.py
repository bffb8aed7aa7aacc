"""What a stage does with one micro-batch, and what it keeps of it between its actions."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch.autograd.graph import GradientEdge

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.nests import Nest, map_tensors, tensors_of
from gpipe_hpc.engine.backward.calls import accumulate_gradients, edge_of
from gpipe_hpc.engine.backward.joints import can_join
from gpipe_hpc.engine.backward.splitting import Deferred
from gpipe_hpc.engine.memory.offload import HostCopy
from gpipe_hpc.engine.memory.outlets import Outlets, apart
from gpipe_hpc.engine.precision import StageCasts
from gpipe_hpc.engine.promises import Promises
from gpipe_hpc.engine.routes import BATCH, State
from gpipe_hpc.engine.segment import Noted, Segment
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.state.keyed import LayerKey
from gpipe_hpc.engine.state.passage import EVALUATION, Again, Forward, Passage, Returning
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import SumOver, normalising_together

Gradients = Sequence[torch.Tensor | None]
_NOTHING: Final = nullcontext()


class Keep(Enum):
    """What a forward leaves behind for the backward."""

    NOTHING = "nothing"  # evaluation
    INPUT = "input"  # of layers that are recomputed the input alone: an R will make the rest
    GRAPH = "graph"  # everything autograd saved


class Recipe(NamedTuple):
    """How a stage's forward of one micro-batch prepares its backward."""

    keep: Keep
    splits: bool = False  # the backward comes as I and W
    offloads: bool = False  # what is kept goes to the host until FETCH


class Start(NamedTuple):
    """Where backward begins: a loss, a scalar, and its gradient."""

    total: torch.Tensor
    gradient: torch.Tensor


class Part(NamedTuple):
    """Which micro-batch is run, of how many samples, and whether for the second time.

    `passage`: what to do about the state that the run changes.
    """

    microbatch: int
    num_samples: int
    again: bool
    passage: Passage = EVALUATION


class Listener(Protocol):
    """Takes what comes of a stage's layers besides their output."""

    def finish(self, part: Part, output: Nest) -> list[Start]:
        """Take the output of the last stage's layers; return where backward begins."""

    def note(self, part: Part, noted: list[Noted]) -> list[Start]:
        """Take what layers reported; return the losses among it, for backward."""


class _KeptSegment(NamedTuple):
    segment: Segment
    state: State | None  # what R starts from; None where nothing will be recomputed
    leaves: list[torch.Tensor]  # the input's tensors that require a gradient
    edges: list[GradientEdge | None]  # where backward enters, one for each gradient to come
    starts: list[tuple[GradientEdge, torch.Tensor]]  # losses of its layers
    returning: Returning | None = None  # what R is to go by; None where there is none to come
    promised: tuple[bool, ...] = ()  # of an R's outputs: which a gradient comes for
    versions: tuple[int, ...] = ()  # of the state's tensors: nobody may write into them


class _Kept(NamedTuple):
    segments: list[_KeptSegment]
    num_leaves: list[int]  # the gradients that each source is given back
    num_samples: int
    deferred: Deferred | None = None  # what takes weight gradients in place of autograd
    host: HostCopy | None = None  # where it goes between OFFLOAD and FETCH


class StageWork:
    """Run F, R, B, I and W of one stage.

    An empty micro-batch (no samples) calls no layer and adds nothing. `peers`: the ranks that
    BatchNorm layers normalise a micro-batch with; None for this one alone.
    """

    def __init__(self, stage: Stage, listener: Listener, peers: Group | None = None) -> None:
        self.stage = stage
        self._listener = listener
        self._peers = peers
        self._is_last = not stage.routes.destinations
        self._is_first = stage.routes.sources[0].stage == BATCH
        parameters = [p for layer in stage.layers.values() for p in layer.parameters()]
        self._parameters = parameters
        self._casts = StageCasts(stage.precision, stage.device, parameters)
        self._promises = Promises()
        self._outlets = Outlets()
        self._kept: dict[int, _Kept] = {}
        self._deferred: dict[int, Deferred] = {}
        self._stream: torch.cuda.Stream | None = None  # of copies to the host, once there are any
        self._num_begun = 0

    def begin(self) -> None:
        """Begin a step, or an evaluation."""
        self._num_begun += 1
        self._casts.begin()
        self._promises.begin(self._parameters)
        self.stage.keyed.begin()
        self.stage.within.begin()

    def end(self) -> None:
        """End it, also one that failed: all that layers have changed is where it belongs."""
        self.stage.within.end()
        self.stage.lasting.settle()

    @property
    def num_kept(self) -> int:
        """Return how many micro-batches something is kept of."""
        return len(self._kept) + len(self._deferred)

    def forward(
        self,
        microbatch: int,
        parts: Sequence[Nest],
        num_samples: int,
        key: LayerKey,
        recipe: Recipe,
    ) -> list[Nest]:
        """Run the layers on one part from each source; return one for each destination.

        An output's requires_grad says what B will be given.
        """
        part = Part(microbatch, num_samples, again=False)
        if num_samples == 0:
            if recipe.keep is not Keep.NOTHING:
                self._kept[microbatch] = _Kept([], [0 for _ in parts], 0)
            return [None for _ in self.stage.routes.destinations]
        state = self.stage.routes.gather(parts)
        if recipe.keep is Keep.NOTHING:
            return self._evaluated(state, key, part)
        host = self._host_copy() if recipe.offloads else None
        deferred = self._defers(recipe.splits, host)
        kept: list[_KeptSegment] = []
        segments = self.stage.segments(recipe.keep is Keep.INPUT)
        for number, (segment, recomputes) in enumerate(segments):
            is_end = number == len(segments) - 1
            given = state
            leaves = [tensor for tensor in given.tensors() if tensor.requires_grad]
            if recomputes:
                returning = Returning(tries=self._num_begun == 1)
                part = part._replace(passage=returning)
                state = self._promising(segment, given, key, part, is_end, host is None)
                left = tensors_of(self._left(state, is_end))
                promised = tuple([tensor.requires_grad for tensor in left])
                versions = tuple([tensor._version for tensor in given.tensors()])
                kept.append(
                    _KeptSegment(segment, given, leaves, [], [], returning, promised, versions)
                )
            else:
                part = part._replace(passage=Forward())
                with host.collecting() if host else nullcontext():
                    state, starts = self._graph(segment, given, key, part, is_end, deferred, host)
                edges = [_edge(tensor) for tensor in _differentiable(self._left(state, is_end))]
                kept.append(_KeptSegment(segment, None, leaves, edges, starts))
                state = _cut_off(state)
                if not (is_end and self._is_last):
                    ends = [*edges, *(edge for edge, _ in starts)]
                    state = self._outlets.apart(state, given.tensors(), segment.place, ends)
            if host is not None:
                host.hold(tensors_of(given) if recomputes else leaves)
        num_leaves = [len(_differentiable(each)) for each in parts]
        self._kept[microbatch] = _Kept(kept, num_leaves, num_samples, deferred, host)
        return self.stage.routes.scatter(state)

    def _evaluated(self, given: State, key: LayerKey, part: Part) -> list[Nest]:
        """Run the layers and keep nothing; return one part for each destination."""
        state, _ = self._run(self.stage.whole, given, key, part, is_end=True)
        if self._is_last:
            return []
        state = _cut_off(state)
        return self.stage.routes.scatter(apart(state, given.tensors()))

    def _defers(self, splits: bool, host: HostCopy | None) -> Deferred | None:
        """Return what takes weight gradients in place of autograd, if anything does."""
        if self.stage.is_compiled or not splits or not can_join():
            return None
        return Deferred(None if host is None else host.hold)

    def recompute(self, microbatch: int, key: LayerKey) -> bool:
        """Run layers again, this time for the graph; False if there was nothing to do."""
        kept = self._kept[microbatch]
        part = Part(microbatch, kept.num_samples, again=True)
        has_run = False
        if kept.host is not None:
            kept.host.wait()
        for number, each in enumerate(kept.segments):
            segment, given, leaves, *_, returning, promised, versions = each
            if given is None:
                continue
            self._check_unwritten(given, versions, microbatch)
            is_end = number == len(kept.segments) - 1
            assert returning is not None, "made by the forward"
            part = part._replace(passage=Again(returning))
            state, starts = self._graph(segment, given, key, part, is_end, kept.deferred, kept.host)
            left = self._promises.keep(segment, promised, tensors_of(self._left(state, is_end)))
            edges = [None if tensor is None else edge_of(tensor) for tensor in left]
            kept.segments[number] = _KeptSegment(segment, None, leaves, edges, starts)
            has_run = True
        return has_run

    def backward(self, microbatch: int, gradients: Gradients) -> list[Gradients]:
        """Run B or I: accumulate parameter gradients; return for each source those of its leaves.

        After a forward that splits, most parameter gradients are left to `weights`.
        `gradients`: one for each output that required a gradient.
        """
        kept = self._kept.pop(microbatch)
        if kept.host is not None:
            kept.host.wait()
        found = self._through(kept, gradients)
        if kept.deferred:
            self._deferred[microbatch] = kept.deferred
        if not self._is_first:
            arrived = [gradient for gradient in gradients if gradient is not None]
            found = apart(found, arrived)
        if len(kept.num_leaves) == 1:
            return [tuple(found)]
        ends = accumulate(kept.num_leaves, initial=0)
        return [tuple(found[first:last]) for first, last in pairwise(ends)]

    def _through(self, kept: _Kept, gradients: Gradients) -> list[torch.Tensor | None]:
        """Run the backward of all segments; return the gradients of the input's leaves."""
        found = list(gradients)
        while kept.segments:
            segment = kept.segments.pop()
            edges, given = [], []
            for edge, gradient in zip(segment.edges, found, strict=True):
                if edge is not None and gradient is not None:
                    edges.append(edge)
                    given.append(gradient)
            for edge, gradient in segment.starts:
                edges.append(edge)
                given.append(gradient)
            if edges:
                states = segment.segment.states.values()
                moving = [(each, each.buffers.moving()) for each in states]
                with self.stage.keyed.backward():
                    accumulate_gradients(edges, given)
                self.stage.gradients.own()
                for each, buffers in moving:
                    each.tell_of_backward(buffers)
            found = [leaf.grad for leaf in segment.leaves]
        return found

    def offload(self, microbatch: int) -> None:
        """Start moving what is kept of a micro-batch to the host."""
        host = self._kept[microbatch].host
        if host is not None:
            host.offload()

    def fetch(self, microbatch: int) -> None:
        """Start moving it back."""
        host = self._kept[microbatch].host
        if host is not None:
            host.fetch(self.stage.device)

    def num_samples(self, microbatch: int) -> int:
        """Return the size of a micro-batch whose forward has run and whose backward has not."""
        return self._kept[microbatch].num_samples

    def weights(self, microbatch: int) -> bool:
        """Run W; False if there was nothing left to do."""
        deferred = self._deferred.pop(microbatch, None)
        if deferred is not None:
            deferred.run()
            self.stage.gradients.own()
        return deferred is not None

    def _run(
        self,
        segment: Segment,
        state: State,
        key: LayerKey,
        part: Part,
        *,
        is_end: bool,
        shares_casts: bool = True,
        has_graph: bool = False,
    ) -> tuple[State, list[Start]]:
        """Run a segment, and what follows the end of the last stage."""
        casts = self._casts.block(segment.place, shared=shares_casts)
        with torch.set_grad_enabled(has_graph), casts:
            return self._layers(segment, state, key, part, is_end, None)

    def _promising(
        self,
        segment: Segment,
        given: State,
        key: LayerKey,
        part: Part,
        is_end: bool,
        shares_casts: bool,
    ) -> State:
        """Run a segment that will be recomputed; its outputs say which gradients shall come."""
        has_graph = self._promises.needs_graph(segment, given)
        state, _ = self._run(
            segment,
            given,
            key,
            part,
            is_end=is_end,
            shares_casts=shares_casts,
            has_graph=has_graph,
        )
        state = _marked(state, self._promises.flags(segment, given, state, has_graph))
        return apart(state, given.tensors())

    def _check_unwritten(self, given: State, versions: tuple[int, ...], microbatch: int) -> None:
        """Raise ModelError if somebody wrote into what a recomputation starts from."""
        for tensor, version in zip(given.tensors(), versions, strict=True):
            if tensor._version != version:
                layers = self.stage.layers
                raise ModelError(
                    f"stage {self.stage.index} (layers {min(layers)} to {max(layers)}): expected "
                    f"the input of micro-batch {microbatch} as it was in its forward, got it "
                    f"written to since; let the layer or hook that keeps it keep a copy (clone)"
                )

    def _graph(
        self,
        segment: Segment,
        state: State,
        key: LayerKey,
        part: Part,
        is_end: bool,
        deferred: Deferred | None,
        host: HostCopy | None,
    ) -> tuple[State, list[tuple[GradientEdge, torch.Tensor]]]:
        """Run a segment for its backward; return where it begins besides the output."""
        # A graph that moves to the host may hold no cast that others use as well.
        casts = self._casts.block(segment.place, shared=host is None)
        in_forward = _NOTHING if deferred is None else deferred.in_forward()
        with torch.enable_grad(), in_forward, casts:
            state, starts = self._layers(segment, state, key, part, is_end, deferred)
        trained = [start for start in starts if start.total.requires_grad]
        return state, [(edge_of(total), gradient) for total, gradient in trained]

    def _layers(
        self,
        segment: Segment,
        state: State,
        key: LayerKey,
        part: Part,
        is_end: bool,
        deferred: Deferred | None,
    ) -> tuple[State, list[Start]]:
        if self.stage.precision != "float32":
            # Autocast remembers casts of leaves until the step ends; only those of weights shall.
            state = _no_leaves(state)
        if self._peers is None:
            state, noted = segment.run(state, key, deferred, part.passage)
        else:
            with normalising_together(self._summing()):
                state, noted = segment.run(state, key, deferred, part.passage)
        starts = self._listener.note(part, noted) if noted else []
        if is_end and self._is_last:
            starts = [*starts, *self._listener.finish(part, state.nest)]
        return state, starts

    def _summing(self) -> SumOver:
        """Return how BatchNorm sums over peers; a compiler must not trace a collective."""
        if not self.stage.is_compiled:
            return self._sum_over_peers
        untraced: Callable[[Any], Any] = torch.compiler.disable
        return cast(SumOver, untraced(self._sum_over_peers))

    def _sum_over_peers(self, tensor: torch.Tensor) -> None:
        assert self._peers is not None, "bound only where there are peers"
        with self.stage.keyed.let_go():
            self._peers.all_reduce(tensor)

    def _host_copy(self) -> HostCopy:
        stage = self.stage
        modules = stage.layers.values()
        lasting = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        if stage.device.type == "cuda" and self._stream is None:
            stream: Any = torch.cuda.Stream
            self._stream = stream(stage.device)
        return HostCopy(lasting, self._stream)

    def _left(self, state: State, is_end: bool) -> Nest:
        """Return what of a segment's output gradients come back for, in their order."""
        return self.stage.routes.scatter(state) if is_end else state


def _edge(tensor: torch.Tensor) -> GradientEdge | None:
    # An edge instead of the tensor: the output's own memory is free once it has left.
    return edge_of(tensor) if tensor.requires_grad else None


def _differentiable(nest: Nest) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(nest) if tensor.requires_grad]


def _marked(state: State, flags: Sequence[bool]) -> State:
    """Return the tensors of a state as leaves without a graph that require a gradient or not."""
    values = iter(flags)

    def marked(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(next(values))

    return cast(State, map_tensors(marked, state))


def _no_leaves(state: State) -> State:
    viewed = map_tensors(lambda t: t.view_as(t) if t.requires_grad and t.is_leaf else t, state)
    return cast(State, viewed)


def _cut_off(state: State) -> State:
    """Return a segment's output as the next one gets it: new leaves, that nobody else holds."""
    cut_off = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), state)
    return cast(State, cut_off)
