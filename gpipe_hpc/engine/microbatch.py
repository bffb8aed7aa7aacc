"""What a stage does with one micro-batch: F, R, B or I, W, OFFLOAD and FETCH."""

from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from gpipe_hpc.comm.aliases import is_buffer, mark_buffer, storages_of
from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.nests import Nest, map_tensors, tensors_of
from gpipe_hpc.engine.astray import refuse_astray
from gpipe_hpc.engine.backward.calls import accumulate_gradients, edge_of
from gpipe_hpc.engine.backward.outsiders import NUM_LOOKED, Outsiders
from gpipe_hpc.engine.backward.splitting import Deferred
from gpipe_hpc.engine.batch.intake import Intake
from gpipe_hpc.engine.layers.segment import Segment
from gpipe_hpc.engine.layers.surroundings import Inside, Manner, Surroundings
from gpipe_hpc.engine.memory.host_room import HostRoom
from gpipe_hpc.engine.memory.kept import Kept, KeptSegment
from gpipe_hpc.engine.memory.offload import HostCopy
from gpipe_hpc.engine.memory.outlets import Outlets, apart
from gpipe_hpc.engine.memory.promises import Promises
from gpipe_hpc.engine.run import Run
from gpipe_hpc.engine.stages.routes import BATCH, State
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.engine.state.buffers import Lasting
from gpipe_hpc.engine.state.layer import LayerState
from gpipe_hpc.engine.state.passage import EVALUATION, Again, Forward, Returning
from gpipe_hpc.engine.sums.fetched import Fetched
from gpipe_hpc.engine.sums.loss import (
    LossFunction,
    LossTerm,
    LossWatch,
    Noted,
    has_lost_graph,
    loss_term,
    refuse_constant,
)
from gpipe_hpc.errors import GpipeError, ModelError
from gpipe_hpc.models import Reductions, torch_loss
from gpipe_hpc.torch_compat import can_split_backward

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
    shares_casts: bool = True  # of weights, with all micro-batches of the step


class Made(NamedTuple):
    """What the forward of one micro-batch made, held by no graph.

    `parts`: one for each destination; a tensor's requires_grad says what B will be given. At the
    end of the last stage: `term`, what it adds to the loss, or `outputs`, one, if that is wanted.
    `noted`: what layers and the loss reported.
    """

    parts: list[Nest]
    term: LossTerm | None = None
    outputs: tuple[Nest, ...] = ()
    noted: Sequence[Noted] = ()


class _Part(NamedTuple):
    """A micro-batch of a run, with the number of its samples."""

    run: Run
    microbatch: int
    num_samples: int


class _Ran(NamedTuple):
    """What the run of one segment made. `losses`: where a backward begins besides the output."""

    state: State
    noted: list[Noted]
    term: LossTerm | None
    losses: list[torch.Tensor]


class StageWork:
    """Run one stage's actions, and keep what lies between them.

    An empty micro-batch (no samples) calls no layer and adds nothing. `peers`: the ranks that
    BatchNorm layers normalise a micro-batch with; None for this one alone. `intake`: what brings
    targets; None for one of its own. `room`: where OFFLOAD moves to, None where there is none.
    `sends`: other ranks get its outputs. `outsiders`: the parameters that backwards may not reach.
    """

    def __init__(
        self,
        stage: Stage,
        peers: Group | None = None,
        intake: Intake | None = None,
        room: HostRoom | None = None,
        *,
        sends: bool = False,
        outsiders: Outsiders | None = None,
    ) -> None:
        self.stage, self._room, self._sends = stage, room, sends
        self._outsiders = outsiders
        self._intake = intake or Intake(stage.device)
        self._is_last = not stage.routes.destinations
        self._is_first = stage.routes.sources[0].stage == BATCH
        self._parameters = [p for layer in stage.layers.values() for p in layer.parameters()]
        self._surroundings = Surroundings(stage, self._parameters, peers)
        self._promises = Promises()
        self._outlets = Outlets()
        self._loss: tuple[LossFunction, LayerState] | None = None
        self._lasting_of_loss = Lasting()
        self._kept: dict[int, Kept] = {}
        self._deferred: dict[int, Deferred] = {}
        self._num_begun = 0
        self._num_looked = self._looked_in = 0  # in how many runs, and in which last
        self._constants: list[Fetched] = []  # losses without a graph, in the step before

    def begin(self) -> None:
        """Begin a step, or an evaluation."""
        self._num_begun += 1
        if self.stage.loss_watch is not None:
            self.stage.loss_watch.begin()
        constants, self._constants = self._constants, []
        for loss in constants:
            refuse_constant(float(loss.read()))
        self._surroundings.begin()
        self._promises.begin(self._parameters)
        self.stage.within.begin()

    def end(self) -> None:
        """End it, also one that failed: all that layers have changed is where it belongs.

        Nothing is kept any longer.
        """
        self._kept.clear()
        self._deferred.clear()
        self.stage.within.end()
        self.stage.lasting.settle()
        self._lasting_of_loss.settle()

    def refuse_draws(self) -> None:
        """Raise ModelError if a backward of the step, which has come to its end, drew numbers."""
        self._surroundings.end()

    @property
    def num_kept(self) -> int:
        """Return how many micro-batches something is kept of."""
        return len(self._kept) + len(self._deferred)

    def forward(
        self, run: Run, microbatch: int, parts: Sequence[Nest], num_samples: int, recipe: Recipe
    ) -> Made:
        """Run the layers, and the loss behind the last, on one part from each source."""
        routes = self.stage.routes
        if num_samples == 0:
            if recipe.keep is not Keep.NOTHING:
                self._kept[microbatch] = Kept([], [0 for _ in parts], 0)
            return Made([None for _ in routes.destinations])
        part = _Part(run, microbatch, num_samples)
        state = routes.gather(parts)
        if recipe.keep is Keep.NOTHING:
            return self._evaluated(part, state)
        host = self._host_copy() if recipe.offloads else None
        deferred = self._defers(recipe.splits, host)
        kept: list[KeptSegment] = []
        noted: list[Noted] = []
        segments = self.stage.segments(recipe.keep is Keep.INPUT)
        for number, (segment, recomputes) in enumerate(segments):
            is_end = number == len(segments) - 1
            given = state
            leaves = [tensor for tensor in given.tensors() if tensor.requires_grad]
            if recomputes:
                # On leaves of its own: a hook that a layer puts on its input, here or in R, belongs
                # to that run alone. R's are the ones that gradients come to.
                own = _without_hooks(given)
                # Its outputs say which gradients shall come.
                has_graph = self._promises.needs_graph(segment, own)
                # The first forward of all makes a graph, unlike those of later steps.
                returning = Returning(tries=self._num_begun in (1, 2))
                manner = Manner(returning, has_graph, recipe.shares_casts)
                state, reported, term, _ = self._run(part, segment, own, manner, is_end=is_end)
                reported, term = _without_graph(reported, term)
                buffers = self._places_in_buffers(state, returning)
                state = _marked(state, self._promises.flags(segment, own, state, has_graph))
                state = _with_marks(apart(state, own.tensors()), buffers)
                left = self._left(state, is_end)
                promised = tuple([tensor.requires_grad for tensor in left])
                versions = tuple([tensor._version for tensor in given.tensors()])
                kept.append(
                    KeptSegment(segment, given, leaves, [], [], returning, promised, versions)
                )
            else:
                passage = Forward()
                manner = Manner(passage, True, recipe.shares_casts, deferred, host)
                state, reported, term, losses = self._run(
                    part, segment, given, manner, is_end=is_end
                )
                edges = [_edge(each) for each in self._left(state, is_end) if each.requires_grad]
                starts = _starts(run, losses)
                reported, term = _without_graph(reported, term)
                kept.append(KeptSegment(segment, None, leaves, edges, starts))
                if not (is_end and self._is_last):
                    ends = [*edges, *(edge for edge, _ in starts)]
                    buffers = self._places_in_buffers(state, passage)
                    state = _cut_off(state)
                    state = self._outlets.apart(state, given.tensors(), segment.place, ends)
                    state = _with_marks(state, buffers)
            noted += reported
            if host is not None:
                host.hold(given.tensors() if recomputes else leaves)
        num_leaves = [len(_differentiable(each)) for each in parts]
        self._kept[microbatch] = Kept(
            kept, num_leaves, num_samples, deferred, host, recipe.shares_casts
        )
        if noted:
            statistics = [pair for each in noted for pair in each.reports.statistics]
            self.stage.statistics.note(microbatch, statistics)
        if self.stage.parameters.compares_values:
            self.stage.parameters.note_forward()
        return Made(routes.scatter(state), term, noted=noted)

    def _evaluated(self, part: _Part, given: State) -> Made:
        """Run the layers and keep nothing."""
        manner = Manner(EVALUATION)
        state, noted, term, _ = self._run(part, self.stage.whole, given, manner, is_end=True)
        noted, term = _without_graph(noted, term)
        if not self._is_last:
            state = _cut_off(state)
            return Made(self.stage.routes.scatter(apart(state, given.tensors())), noted=noted)
        if term is not None:
            return Made([], term, noted=noted)
        # Copied: the last layer may write into it again for the next micro-batch.
        output = map_tensors(lambda tensor: tensor.detach().clone(), state.nest)
        return Made([], outputs=(output,), noted=noted)

    def _defers(self, splits: bool, host: HostCopy | None) -> Deferred | None:
        """Return what takes weight gradients in place of autograd, if anything does."""
        if self.stage.is_compiled or not splits or not can_split_backward():
            return None
        return Deferred(None if host is None else host.hold)

    def recompute(self, run: Run, microbatch: int) -> bool:
        """Run layers again, this time for the graph; False if there was nothing to do."""
        kept = self._kept[microbatch]
        part = _Part(run, microbatch, kept.num_samples)
        has_run = False
        if kept.host is not None:
            kept.host.wait()
        for number, each in enumerate(kept.segments):
            segment, given, leaves, _, _, returning, promised, _ = each
            if given is None:
                continue
            if each.is_written():
                raise self._written(microbatch)
            is_end = number == len(kept.segments) - 1
            assert returning is not None, "made by the forward"
            manner = Manner(Again(returning), True, kept.shares_casts, kept.deferred)
            if self.stage.parameters.compares_values:
                with self.stage.parameters.unchanged(segment.where):
                    state, *_, losses = self._run(part, segment, given, manner, is_end=is_end)
            else:
                state, *_, losses = self._run(part, segment, given, manner, is_end=is_end)
            left = self._promises.keep(segment, promised, self._left(state, is_end))
            edges = [None if tensor is None else edge_of(tensor) for tensor in left]
            starts = _starts(run, losses)
            kept.segments[number] = KeptSegment(segment, None, leaves, edges, starts)
            has_run = True
        return has_run

    def _run(
        self, part: _Part, segment: Segment, given: State, manner: Manner, *, is_end: bool
    ) -> _Ran:
        """Run the layers of a segment, and behind the last one of the model the loss."""
        key = part.run.keys(part.microbatch)
        loss = self._state_of_loss(part.run) if is_end and self._is_last else None
        roll = segment.roll(loss)
        roll.call()
        if self._surroundings.casts:
            # Autocast remembers casts of leaves until the step ends; only those of weights shall.
            given = _no_leaves(given)
        (nest, stashed), watch = segment.protect(given, roll.modes)
        noted: list[Noted] = []
        losses: list[torch.Tensor] = []
        term: LossTerm | None = None
        shards = self.stage.gradients.shards
        gathered = shards if shards is not None and shards.is_gathering else None
        with self._surroundings.around(segment, roll, manner) as inside:
            reports = inside.reports
            for place, layer in enumerate(segment.layers):
                if gathered is not None:
                    gathered.wait_for_layer(layer.index)
                call = layer.with_skips(stashed) if stashed or layer.has_skips else layer.call
                block = inside.enter(place, key(layer.index))
                try:
                    if block is None:
                        nest = call(nest)
                    else:
                        with block:
                            nest = call(nest)
                except Exception as error:
                    inside.fail(error)
                    error.add_note(layer.where)
                    raise
                if block is not None:
                    inside.leave(place, nest)
                if watch.shares_memory:
                    segment.refuse_shared(watch, layer)
                if reports:
                    losses += reports.losses.values()
                    noted.append(Noted(layer.index, reports.take()))
            segment.learn(watch)
            self._refuse_astray((nest, stashed), segment.where)
            if is_end and self._sends and (stashed or type(nest) is not torch.Tensor):
                self._refuse_subclasses(State(nest, stashed), segment)
            if loss is not None:
                inside.end_layers()
                term = self._end(part, nest, inside, loss, len(segment.layers))
                self._refuse_astray((term.total, term.weight), loss.where)
                losses.append(term.total)
                if reports:
                    losses += reports.losses.values()
                    noted.append(Noted(loss.index, reports.take()))
        return _Ran(State(nest, stashed), noted, term, losses)

    def _end(
        self, part: _Part, output: Nest, inside: Inside, loss: LayerState, place: int
    ) -> LossTerm:
        """Run the loss: the layer behind the last, at this place of the roll."""
        run, microbatch, num_samples = part
        assert run.loss_fn is not None, "known from the state"
        target = run.target(microbatch, num_samples, self._intake)
        block = inside.enter(place, run.keys(microbatch)(loss.index))
        watch = None
        if self._num_begun <= NUM_LOOKED:
            watch = self._watch_loss(run.loss_fn, loss.where)
        try:
            with block or _NOTHING:
                term = loss_term(run.loss_fn, output, target, num_samples, watch)
            if watch is not None and self.stage.loss_watch is not None:
                self.stage.loss_watch.note(watch, term, num_samples, is_cut=run.is_cut)
            if has_lost_graph(term, output):
                self._look_at_constant(term.total)
        except Exception as error:
            inside.fail(error)
            if not isinstance(error, GpipeError):  # ours say so themselves
                error.add_note(loss.where)
            raise
        if block is not None:
            inside.leave(place, term.total)
        return term

    def _watch_loss(self, function: LossFunction, where: str) -> Reductions | None:
        """Return what looks at the sums and means that a loss of the user's takes."""
        if self.stage.is_compiled or torch_loss(function) is not None:
            return None
        if self.stage.loss_watch is None:
            self.stage.loss_watch = LossWatch(self.stage.device, where)
        return Reductions()

    def _refuse_astray(self, nest: Nest, where: str) -> None:
        """Refuse what layers or the loss have left on another accelerator."""
        if self.stage.device.is_accelerator:
            remedy = "let the layer leave its output where its input was"
            refuse_astray(nest, self.stage.device, where, remedy, ModelError)

    def _refuse_subclasses(self, left: State, segment: Segment) -> None:
        """Refuse tensors for other ranks that are of a class of their own.

        They would arrive as plain ones. Here, as not all of them keep their class when detached.
        """
        for tensor in left.tensors():
            kind = type(tensor)
            is_plain = kind is torch.Tensor or kind is nn.Parameter
            if not is_plain and not tensor.is_nested:  # the boundary refuses those by that name
                raise ModelError(
                    f"{segment.where}: expected plain tensors for the stages of other ranks, got a "
                    f"{kind.__module__}.{kind.__qualname__} of shape {tuple(tensor.shape)}, which "
                    f"would arrive as a torch.Tensor, without what its class does; let the layer "
                    f"return tensor.as_subclass(torch.Tensor), or put the layers that need the "
                    f"class into one stage"
                )

    def _look_at_constant(self, loss: torch.Tensor) -> None:
        """Refuse a loss without a graph: one of a device when the next step begins, not now.

        The host would wait for it.
        """
        if self.stage.device.is_accelerator and self.stage.device.holds(loss):
            self._constants.append(Fetched.of(loss, self.stage.device))
        else:
            refuse_constant(float(loss))

    def _state_of_loss(self, run: Run) -> LayerState | None:
        """Return what is known of the state that a loss changes; a module may have buffers."""
        loss_fn = run.loss_fn
        if loss_fn is None:
            return None
        known = self._loss
        if known is None or known[0] is not loss_fn:
            module = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
            where = f"loss_fn ({getattr(loss_fn, '__name__', type(loss_fn).__name__)})"
            keyed, lasting = self.stage.keyed, self._lasting_of_loss
            state = LayerState(run.num_layers, module, where, keyed, lasting)
            known = self._loss = loss_fn, state
        return known[1]

    def backward(self, microbatch: int, gradients: Gradients) -> list[Gradients]:
        """Run B or I: accumulate parameter gradients; return for each source those of its leaves.

        After a forward that splits, most parameter gradients are left to `weights`.
        `gradients`: one for each output that required a gradient.
        """
        kept = self._kept.pop(microbatch)
        if kept.host is not None:
            kept.host.wait()
        if self._num_looked < NUM_LOOKED and kept.num_samples:
            self._look_for_outsiders(kept)
        found = list(gradients)
        while kept.segments:
            found = self._through(kept.segments.pop(), found)
        if kept.deferred:
            self._deferred[microbatch] = kept.deferred
        if self.stage.squares is not None:
            self.stage.squares.note(microbatch, is_last=not kept.deferred)
        if not self._is_first:
            arrived = [gradient for gradient in gradients if gradient is not None]
            found = apart(found, arrived)
        if len(kept.num_leaves) == 1:
            return [tuple(found)]
        ends = accumulate(kept.num_leaves, initial=0)
        return [tuple(found[first:last]) for first, last in pairwise(ends)]

    def _look_for_outsiders(self, kept: Kept) -> None:
        """Look at the graphs of one micro-batch in each of the first steps."""
        if self._outsiders is None or self._looked_in == self._num_begun:
            return
        self._looked_in, self._num_looked = self._num_begun, self._num_looked + 1
        loss_fn = self._loss[0] if self._loss is not None else None
        for segment in kept.segments:
            edges = [edge for edge in segment.edges if edge is not None]
            edges += [edge for edge, _ in segment.starts]
            self._outsiders.check(edges, f"stage {self.stage.index}", loss_fn)

    def _through(self, kept: KeptSegment, gradients: Gradients) -> list[torch.Tensor | None]:
        """Run the backward of one segment; return the gradients of its input's leaves."""
        pairs = zip(kept.edges, gradients, strict=True)
        entered = [(e, g) for e, g in pairs if e is not None and g is not None]
        entered += kept.starts
        if entered:
            edges, given = [edge for edge, _ in entered], [gradient for _, gradient in entered]
            states = [state for state in kept.segment.states if state.buffers.move]
            moving = [(state, state.buffers.moving()) for state in states]
            with self._surroundings.backward(kept.segment):
                accumulate_gradients(edges, given)
            self.stage.gradients.unshare()
            for state, buffers in moving:
                state.tell_of_backward(buffers)
        return [leaf.grad for leaf in kept.leaves]

    def weights(self, microbatch: int) -> bool:
        """Run W; False if there was nothing left to do."""
        deferred = self._deferred.pop(microbatch, None)
        if deferred is not None:
            with self._surroundings.weight_gradients(self.stage.whole):
                deferred.run()
            self.stage.gradients.unshare()
            if self.stage.squares is not None:
                self.stage.squares.note(microbatch, is_last=True)
        return deferred is not None

    def offload(self, microbatch: int) -> None:
        """Start moving what is kept of a micro-batch to the host."""
        host = self._kept[microbatch].host
        if host is not None:
            host.offload()

    def fetch(self, microbatch: int) -> None:
        """Start moving it back."""
        host = self._kept[microbatch].host
        if host is not None:
            host.fetch()

    def num_samples(self, microbatch: int) -> int:
        """Return the size of a micro-batch whose forward has run and whose backward has not."""
        return self._kept[microbatch].num_samples

    def _host_copy(self) -> HostCopy:
        stage = self.stage
        modules = stage.layers.values()
        lasting = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        assert self._room is not None, "made for every table with OFFLOAD"
        return HostCopy(lasting, stage.device, self._room)

    def _left(self, state: State, is_end: bool) -> list[torch.Tensor]:
        """Return what of a segment's output gradients come back for, in their order."""
        if not is_end:
            return state.tensors()
        return [each for part in self.stage.routes.scatter(state) for each in tensors_of(part)]

    def _places_in_buffers(self, state: State, passage: Forward | Returning) -> Sequence[int]:
        """Return which tensors of a state lie in buffers or frozen parameters, by position.

        Also in those of earlier stages. In the first steps; of several tensors, as one alone is
        never more than read.
        """
        tensors = state.tensors() if self._num_begun <= NUM_LOOKED else []
        if len(tensors) < 2:
            return ()
        lasting = [t for m in self.stage.layers.values() for t in (*m.parameters(), *m.buffers())]
        held = storages_of([each.tensor for each in passage.returned])
        held |= storages_of([each for each in lasting if not each.requires_grad])
        return [
            at for at, each in enumerate(tensors) if is_buffer(each) or held & storages_of([each])
        ]

    def _written(self, microbatch: int) -> ModelError:
        layers = self.stage.layers
        return ModelError(
            f"stage {self.stage.index} (layers {min(layers)} to {max(layers)}): expected the input "
            f"of micro-batch {microbatch} as it was in its forward, got it written to since; let "
            f"the layer or hook that keeps it keep a copy (clone)"
        )


def _starts(run: Run, losses: Sequence[torch.Tensor]) -> list[tuple[GradientEdge, torch.Tensor]]:
    """Return where a backward begins besides the output, each with its gradient."""
    return [(edge_of(loss), run.gradient_of(loss)) for loss in losses if loss.requires_grad]


def _without_graph(
    noted: Sequence[Noted], term: LossTerm | None
) -> tuple[list[Noted], LossTerm | None]:
    term = None if term is None else term.without_graph()
    return [each.without_graph() for each in noted], term


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

    return state.map(marked)


def _with_marks(state: State, buffers: Sequence[int]) -> State:
    """Mark tensors that lie in buffers, but not those that a layer has computed with a graph."""
    tensors = state.tensors() if buffers else []
    for place in buffers:
        if not tensors[place].requires_grad:
            mark_buffer(tensors[place])
    return state


def _no_leaves(state: State) -> State:
    return state.map(lambda t: t.view_as(t) if t.requires_grad and t.is_leaf else t)


def _without_hooks(state: State) -> State:
    """Return a state on whose tensors hooks may be put that others do not see."""
    return state.map(lambda t: t.detach().requires_grad_() if t.requires_grad else t)


def _cut_off(state: State) -> State:
    """Return a segment's output as the next one gets it: new leaves, that nobody else holds."""
    return state.map(lambda t: t.detach().requires_grad_(t.requires_grad))
