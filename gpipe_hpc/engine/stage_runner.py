"""Run one stage's share of a step: forward, recomputation and backward of each micro-batch.

                     input                               gradient of the output
    F  layers.run  ->  |  -> output, leaves               |  B  autograd from `edges`
                       v                                  v
                  saved[microbatch]  ....................  gradients of `leaves`

A forward that trains keeps autograd's graph. With recomputation (GPipe's trade) it keeps the input
alone, and R builds the graph just before B needs it. A backward can be split: I makes the gradients
of the input, W those of the weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.transport.aliases import is_buffer, mark_buffer, storages_of
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.engine.backward.calls import accumulate_gradients, edge_of
from gpipe_hpc.engine.backward.draws import BackwardDraws
from gpipe_hpc.engine.backward.outsiders import NUM_LOOKED, Outsiders
from gpipe_hpc.engine.backward.splitting import Deferred
from gpipe_hpc.engine.buffers import FoundBuffer, PersistentBuffers, ReturnedBuffer
from gpipe_hpc.engine.inputs import refuse_astray
from gpipe_hpc.engine.layer_runner import (
    ASTRAY,
    NOTHING_AROUND,
    ForwardOptions,
    Layer,
    LayerOutput,
    LayerRunner,
    Loss,
    Record,
    RunMode,
)
from gpipe_hpc.engine.loss import (
    LayerReports,
    LossTerm,
    LossWatch,
    has_graph,
    loss_term,
    refuse_constant,
)
from gpipe_hpc.engine.offload import HostCopy, PinnedBufferPool
from gpipe_hpc.engine.outputs import (
    REQUIRES_GRAD,
    OutputIsolation,
    RequiresGradTracker,
    copy_if_shared,
)
from gpipe_hpc.engine.precision import StageCasts, casts_keep_their_graph
from gpipe_hpc.engine.run import Intake, Run
from gpipe_hpc.engine.stages.routes import BATCH, State
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.errors import GpipeError, ModelError
from gpipe_hpc.models import (
    LossFunction,
    Reductions,
    SumOver,
    TorchLoss,
    normalising_together,
    torch_loss,
)
from gpipe_hpc.pytree import Nest, map_tensors, tensors_of
from gpipe_hpc.torch_compat import can_split_backward, storage_use_count

Gradients = Sequence[torch.Tensor | None]
_VERSION: Final = attrgetter("_version")
_ALONE: Final = 2  # who refers to memory that no other tensor shares: the tensor, and who asks


class ForwardPlan(NamedTuple):
    """What the table says of one forward: which run of the layers, and how its backward comes.

    `splits`: as I and W. `offloads`: what is kept goes to the host until FETCH. `shares_casts`: of
    weights, with all micro-batches of the step.
    """

    mode: RunMode
    splits: bool = False
    offloads: bool = False
    shares_casts: bool = True


class ForwardResult(NamedTuple):
    """What the forward of one micro-batch made, held by no graph.

    `parts`: one for each destination; a tensor's requires_grad says what B will be given. At the
    end of the last stage: `term`, what it adds to the loss, or `outputs`, one, if that is wanted.
    `noted`: what layers and the loss reported.
    """

    parts: list[Nest]
    term: LossTerm | None = None
    outputs: tuple[Nest, ...] = ()
    noted: Sequence[LayerReports] = ()


class SavedRun(NamedTuple):
    """What is kept of one run of some layers.

    `leaves`: the tensors of their input that require a gradient. `edges`: where the backward
    enters, one for each gradient to come; edges, not tensors, so that the output's own memory is
    free once it has left. `starts`: where it enters besides, at losses. The rest is for an R:
    `given`, what it starts from, None if none comes; `record`; `promised`, which of its outputs a
    gradient comes for; `versions` of the tensors in `given`.
    """

    runner: LayerRunner
    leaves: list[torch.Tensor]
    edges: Sequence[GradientEdge | None]
    starts: Sequence[tuple[GradientEdge, torch.Tensor]]
    given: State | None = None
    record: Record | None = None
    promised: tuple[bool, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(slots=True)
class Saved:
    """What is kept of one micro-batch between its forward and its backward.

    `num_leaves`: the gradients that each source is given back, if there are several. `deferred`:
    what takes weight gradients in place of autograd. `host`: where it goes between OFFLOAD and
    FETCH.
    """

    num_samples: int
    num_leaves: Sequence[int] = ()
    deferred: Deferred | None = None
    host: HostCopy | None = None
    shares_casts: bool = True
    runs: list[SavedRun] = field(default_factory=list)


class StageRunner:
    """Run one stage's actions, and keep what lies between them.

    An empty micro-batch (no samples) calls no layer and adds nothing. `peers`: the ranks that
    BatchNorm layers normalise a micro-batch with; None for this one alone. `intake`: what brings
    targets; None for one of its own. `room`: where OFFLOAD moves to, None if nothing does.
    `sends`: other ranks get its outputs. `outsiders`: the parameters that backwards may not reach.
    """

    def __init__(
        self,
        stage: Stage,
        peers: Group | None = None,
        intake: Intake | None = None,
        room: PinnedBufferPool | None = None,
        *,
        sends: bool = False,
        outsiders: Outsiders | None = None,
    ) -> None:
        self.stage, self._peers, self._room, self._sends = stage, peers, room, sends
        self._outsiders = outsiders
        self._intake = intake or Intake(stage.device)
        self.saved: dict[int, Saved] = {}
        self._deferred: dict[int, Deferred] = {}
        routes = stage.routes
        self._is_first = routes.sources[0].stage == BATCH
        self._is_last = not routes.destinations
        # One tensor comes in, or goes out, without skips: nothing to put together or to take apart.
        self._is_joined = len(routes.sources) > 1 or bool(routes.sources[0].names)
        self._is_parted = len(routes.destinations) != 1 or bool(routes.destinations[0].names)
        self._parameters = [p for layer in stage.layers.values() for p in layer.parameters()]
        self._casts = StageCasts(stage.precision, stage.device, self._parameters)
        self._has_surroundings = (
            self._casts.is_casting or peers is not None or not casts_keep_their_graph()
        )
        if peers is not None:
            stage.random.seeds_all = True  # a sum over peers cannot run once more on one of them
        self._tracker = RequiresGradTracker()
        self._isolation = OutputIsolation()
        self._backward_draws = BackwardDraws(stage.random, stage.whole)
        self._loss: tuple[LossFunction, Layer] | None = None
        self._known_loss: TorchLoss | None = None  # how the loss reduces, if it is one of torch's
        self._lasting_of_loss = PersistentBuffers()
        self._num_begun = 0
        self._num_looked = self._looked_in = 0  # in how many runs, and in which last
        self._constants: list[AsyncHostTensor] = []  # losses without a graph, in the step before

    def begin(self) -> None:
        """Begin a step, or an evaluation."""
        self._num_begun += 1
        if self.stage.loss_watch is not None:
            self.stage.loss_watch.begin()
        constants, self._constants = self._constants, []
        for loss in constants:
            refuse_constant(float(loss.read()))
        if self._loss is not None:
            self._known_loss = torch_loss(self._loss[0])
        self._casts.begin()
        self.stage.random.begin()
        self._backward_draws.begin()
        self._tracker.begin(self._parameters)
        self.stage.within.begin()

    def end(self) -> None:
        """End it, also one that failed: all that layers have changed is where it belongs.

        Nothing is kept any longer.
        """
        self.saved.clear()
        self._deferred.clear()
        self.stage.within.end()
        self.stage.lasting.settle()
        self._lasting_of_loss.settle()

    def refuse_draws(self) -> None:
        """Raise ModelError if a backward of the step, which has come to its end, drew numbers."""
        self._backward_draws.end()

    @property
    def num_kept(self) -> int:
        """Return how many micro-batches something is kept of."""
        return len(self.saved) + len(self._deferred)

    def forward(
        self, run: Run, microbatch: int, parts: Sequence[Nest], num_samples: int, plan: ForwardPlan
    ) -> ForwardResult:
        """Run the layers, and the loss behind the last, on one part from each source."""
        if num_samples == 0:
            if plan.mode is not RunMode.EVALUATE:
                self.saved[microbatch] = Saved(0, [0 for _ in parts] if self._is_joined else ())
            return ForwardResult([None for _ in self.stage.routes.destinations])
        state = self.stage.routes.gather(parts) if self._is_joined else State(parts[0], {})
        if plan.mode is RunMode.EVALUATE:
            return self._evaluate(run, microbatch, num_samples, state)
        saved = Saved(num_samples, shares_casts=plan.shares_casts)
        if self._is_joined or plan.splits or plan.offloads:
            self._prepare(saved, parts, plan)
        noted: list[LayerReports] = []
        term: LossTerm | None = None
        # Usually one run of all layers. If only some are recomputed, each stretch is a run.
        stretches = self.stage.runners[plan.mode is RunMode.RECORD]
        for number, (runner, recomputes) in enumerate(stretches):
            forward = self._record if recomputes else self._train
            is_end = number == len(stretches) - 1
            state, term = forward(run, microbatch, runner, state, saved, noted, is_end=is_end)
        self.saved[microbatch] = saved
        if noted:
            statistics = [pair for each in noted for pair in each.reports.statistics]
            self.stage.statistics.note(microbatch, statistics)
        if self.stage.parameters.compares_values:
            self.stage.parameters.note_forward()
        if self._is_last:
            return ForwardResult([], term, noted=noted)
        outgoing = self.stage.routes.scatter(state) if self._is_parted else [state.nest]
        return ForwardResult(outgoing, term, noted=noted)

    def _prepare(self, saved: Saved, parts: Sequence[Nest], plan: ForwardPlan) -> None:
        """Prepare for several sources, for a backward in two halves, and for OFFLOAD."""
        if self._is_joined:
            saved.num_leaves = [sum(t.requires_grad for t in tensors_of(part)) for part in parts]
        if plan.offloads:
            saved.host = self._host_copy()
        if plan.splits and not self.stage.is_compiled and can_split_backward():
            saved.deferred = Deferred(None if saved.host is None else saved.host.hold)

    def _train(
        self,
        run: Run,
        microbatch: int,
        runner: LayerRunner,
        given: State,
        saved: Saved,
        noted: list[LayerReports],
        *,
        is_end: bool,
    ) -> tuple[State, LossTerm | None]:
        """Run some layers with a graph, which stays for the backward."""
        tensors = _tensors(given)
        leaves = list(filter(REQUIRES_GRAD, tensors))
        options = ForwardOptions(
            RunMode.TRAIN, True, None, saved.shares_casts, saved.deferred, saved.host
        )
        output = self._run(run, microbatch, saved.num_samples, runner, given, options, is_end)
        edges = list(map(_edge_of, filter(REQUIRES_GRAD, self._left(output.state, is_end))))
        starts = _starts(run, output.losses) if output.losses else ()
        saved.runs.append(SavedRun(runner, leaves, edges, starts))
        if output.noted:
            noted += [each.without_graph() for each in output.noted]
        if saved.host is not None:
            saved.host.hold(leaves)
        state, output.state = output.state, State(None, {})  # whose memory is looked at below
        if not (is_end and self._is_last):
            # The next stage must not hold this graph alive: it gets new leaves.
            if isinstance(state.nest, torch.Tensor) and not state.stashed:
                state = State(state.nest.detach().requires_grad_(state.nest.requires_grad), {})
                if not _is_alone(state.nest):
                    ends = [*edges, *(edge for edge, _ in starts)]
                    state = self._isolation.copy_if_shared(state, tensors, runner.place, ends)
            else:
                buffers = self._places_in_buffers(state, output.returned)
                state = state.map(lambda t: t.detach().requires_grad_(t.requires_grad))
                ends = [*edges, *(edge for edge, _ in starts)]
                state = self._isolation.copy_if_shared(state, tensors, runner.place, ends)
                state = _with_marks(state, buffers)
        return state, None if output.term is None else output.term.without_graph()

    def _record(
        self,
        run: Run,
        microbatch: int,
        runner: LayerRunner,
        given: State,
        saved: Saved,
        noted: list[LayerReports],
        *,
        is_end: bool,
    ) -> tuple[State, LossTerm | None]:
        """Run some layers that an R will run again, and keep their input alone."""
        tensors = _tensors(given)
        # On leaves of its own: a hook that a layer puts on its input, here or in R, belongs to that
        # run alone. R's are the ones that gradients come to.
        own = _map(lambda t: t.detach().requires_grad_() if t.requires_grad else t, given)
        own_tensors = _tensors(own)
        # Its outputs say which gradients will come. The first forward of all makes a graph, to see
        # that, unlike those of later steps: so outputs are compared in two steps. On an accelerator
        # the host waits for that: in the first step alone.
        kind = runner.place, *map(REQUIRES_GRAD, own_tensors)
        has_graph = kind not in self._tracker.all_require
        steps = (1,) if self.stage.device.is_accelerator else (1, 2)
        record = Record(compares_all=self._num_begun in steps)
        options = ForwardOptions(
            RunMode.RECORD, has_graph, record, saved.shares_casts, None, saved.host
        )
        output = self._run(run, microbatch, saved.num_samples, runner, own, options, is_end)
        if output.noted:
            noted += [each.without_graph() for each in output.noted]
        state, output.state = output.state, State(None, {})  # whose memory is looked at below
        promised: tuple[bool, ...] = ()
        if has_graph or not (is_end and self._is_last):
            flags = self._tracker.flags(kind, own_tensors, _tensors(state), has_graph=has_graph)
        if not (is_end and self._is_last):
            is_one = type(state.nest) is torch.Tensor and not state.stashed
            buffers = () if is_one else self._places_in_buffers(state, output.returned)
            next_flag = iter(flags).__next__
            state = _map(lambda tensor: tensor.detach().requires_grad_(next_flag()), state)
            if not (is_one and _is_alone(state.nest)):
                state = _with_marks(copy_if_shared(state, own_tensors), buffers)
            promised = tuple(map(REQUIRES_GRAD, self._left(state, is_end)))
        versions = tuple(map(_VERSION, tensors))
        leaves = list(filter(REQUIRES_GRAD, tensors))
        saved.runs.append(SavedRun(runner, leaves, (), (), given, record, promised, versions))
        if saved.host is not None:
            saved.host.hold(tensors)
        return state, None if output.term is None else output.term.without_graph()

    def _evaluate(self, run: Run, microbatch: int, num_samples: int, given: State) -> ForwardResult:
        """Run the layers and keep nothing."""
        options = ForwardOptions(RunMode.EVALUATE)
        output = self._run(run, microbatch, num_samples, self.stage.whole, given, options, True)
        noted = [each.without_graph() for each in output.noted]
        if output.term is not None:
            return ForwardResult([], output.term.without_graph(), noted=noted)
        state, output.state = output.state, State(None, {})
        if self._is_last:
            # Copied: the last layer may write into it again for the next micro-batch.
            copied = map_tensors(lambda tensor: tensor.detach().clone(), state.nest)
            return ForwardResult([], outputs=(copied,), noted=noted)
        state = _map(lambda t: t.detach().requires_grad_(t.requires_grad), state)
        state = copy_if_shared(state, _tensors(given))
        return ForwardResult(self.stage.routes.scatter(state), noted=noted)

    def recompute(self, run: Run, microbatch: int) -> bool:
        """Run layers again, this time for the graph; False if there was nothing to do."""
        saved = self.saved[microbatch]
        has_run = False
        if saved.host is not None:
            saved.host.wait()
        parameters = self.stage.parameters
        for number, each in enumerate(saved.runs):
            if each.given is None:
                continue
            for tensor, version in zip(_tensors(each.given), each.versions, strict=True):
                if tensor._version != version:
                    raise self._written(microbatch)
            is_end = number == len(saved.runs) - 1
            options = ForwardOptions(
                RunMode.REPLAY, True, each.record, saved.shares_casts, saved.deferred
            )
            again = partial(
                self._run, run, microbatch, saved.num_samples, each.runner, each.given, options
            )
            if parameters.compares_values:
                with parameters.unchanged(each.runner.where):
                    output = again(is_end)
            else:
                output = again(is_end)
            left = self._left(output.state, is_end)
            edges: list[GradientEdge | None] = []
            if left or each.promised:
                kept = self._tracker.keep(each.runner, each.promised, left)
                edges = [None if tensor is None else _edge_of(tensor) for tensor in kept]
            starts = _starts(run, output.losses) if output.losses else ()
            saved.runs[number] = SavedRun(each.runner, each.leaves, edges, starts)
            has_run = True
        return has_run

    def _run(
        self,
        run: Run,
        microbatch: int,
        num_samples: int,
        runner: LayerRunner,
        given: State,
        options: ForwardOptions,
        is_end: bool,
    ) -> LayerOutput:
        """Run layers, and behind the last one of the model the loss."""
        loss = None
        if is_end and self._is_last and run.loss_fn is not None:
            layer = self._layer_of_loss(run.loss_fn, run.num_layers)
            loss = Loss(layer, partial(self._loss_of, run, microbatch, num_samples))
        shards = self.stage.gradients.shards
        if shards is not None and shards.is_gathering:
            options = options._replace(wait_for_layer=shards.wait_for_layer)
        around = NOTHING_AROUND
        if self._has_surroundings or options.host is not None:
            around = self._around(runner, options)
        if self._casts.is_casting:
            # Autocast remembers casts of leaves until the step ends; only those of weights shall.
            given = _map(lambda t: t.view_as(t) if t.requires_grad and t.is_leaf else t, given)
        output = runner.run(given, run.keys(microbatch), options, loss, around)
        is_one = type(output.state.nest) is torch.Tensor and not output.state.stashed
        if is_end and self._sends and not is_one:
            self._refuse_subclasses(output.state, runner)
        return output

    @contextmanager
    def _around(self, runner: LayerRunner, options: ForwardOptions) -> Iterator[None]:
        """Return what layers run in besides their random numbers, by the settings."""
        if not casts_keep_their_graph():
            # Within an autocast block of the user's around the whole step, casts of a first forward
            # without a graph are kept to the recomputation: each forward casts its weights itself.
            torch.clear_autocast_cache()
        with ExitStack() as blocks:
            if options.host is not None:
                blocks.enter_context(options.host.collecting())
            if self._casts.is_casting:
                blocks.enter_context(self._casts.block(runner.place, shared=options.shares_casts))
            if self._peers is not None:
                blocks.enter_context(normalising_together(self._sum_over_peers))
            yield

    @cached_property
    def _sum_over_peers(self) -> SumOver:
        """Return how BatchNorm sums over peers; a compiler must not trace a collective."""
        peers = self._peers
        assert peers is not None, "asked for only if there are peers"

        def sum_over_peers(tensor: torch.Tensor) -> None:
            with self.stage.random.let_go():
                peers.all_reduce(tensor)

        if not self.stage.is_compiled:
            return sum_over_peers
        untraced: Any = torch.compiler.disable
        return cast(SumOver, untraced(sum_over_peers))

    def _layer_of_loss(self, loss_fn: LossFunction, num_layers: int) -> Layer:
        """Return the loss as the layer behind the last one; a module may have buffers."""
        if self._loss is None or self._loss[0] is not loss_fn:
            module = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
            where = f"loss_fn ({getattr(loss_fn, '__name__', type(loss_fn).__name__)})"
            random, lasting = self.stage.random, self._lasting_of_loss
            self._loss = loss_fn, Layer(num_layers, module, where, random, lasting)
            self._known_loss = torch_loss(loss_fn)
        return self._loss[1]

    def _loss_of(self, run: Run, microbatch: int, num_samples: int, output: Nest) -> LossTerm:
        """Return what one micro-batch adds to the loss."""
        assert run.loss_fn is not None and self._loss is not None, "known from the layer"
        where = self._loss[1].where
        target = run.target(microbatch, num_samples, self._intake)
        known, watch = self._known_loss, None
        if self._num_begun <= NUM_LOOKED and known is None:
            watch = self._watch_loss(where)
        try:
            term = loss_term(run.loss_fn, output, target, num_samples, known, watch)
            if watch is not None and self.stage.loss_watch is not None:
                self.stage.loss_watch.note(watch, term, num_samples, is_cut=run.is_cut)
            # What runs again without a graph, or without one first, is looked at with it.
            lost = not term.total.requires_grad and torch.is_grad_enabled()
            if lost and has_graph(output):
                self._look_at_constant(term.total)
        except Exception as error:
            if not isinstance(error, GpipeError):  # ours say so themselves
                error.add_note(where)
            raise
        if self.stage.device.is_accelerator:
            refuse_astray((term.total, term.weight), self.stage.device, where, ASTRAY, ModelError)
        return term

    def _watch_loss(self, where: str) -> Reductions | None:
        """Return what looks at the sums and means that a loss of the user's takes."""
        if self.stage.is_compiled:
            return None
        if self.stage.loss_watch is None:
            self.stage.loss_watch = LossWatch(self.stage.device, where)
        return Reductions()

    def _look_at_constant(self, loss: torch.Tensor) -> None:
        """Refuse a loss without a graph: one of a device when the next step begins, not now.

        The host would wait for it.
        """
        if self.stage.device.is_accelerator and self.stage.device.holds(loss):
            self._constants.append(AsyncHostTensor.of(loss, self.stage.device))
        else:
            refuse_constant(float(loss))

    def backward(self, microbatch: int, gradients: Gradients) -> list[Gradients]:
        """Run B or I: accumulate parameter gradients; return for each source those of its leaves.

        After a forward that splits, most parameter gradients are left to `weights`.
        `gradients`: one for each output that required a gradient.
        """
        saved = self.saved.pop(microbatch)
        if saved.host is not None:
            saved.host.wait()
        if self._num_looked < NUM_LOOKED and saved.num_samples:
            self._look_for_outsiders(saved)
        found = list(gradients)
        while saved.runs:  # each lets go of its graph
            found = self._backward_of(saved.runs.pop(), found)
        if saved.deferred:
            self._deferred[microbatch] = saved.deferred
        if self.stage.squares is not None:
            self.stage.squares.note(microbatch, is_last=not saved.deferred)
        if not self._is_first and not (
            len(found) == 1 and found[0] is not None and _is_alone(found[0])
        ):
            found = copy_if_shared(found, [each for each in gradients if each is not None])
        if not self._is_joined:
            return [tuple(found)]
        ends = accumulate(saved.num_leaves, initial=0)
        return [tuple(found[first:last]) for first, last in pairwise(ends)]

    def _backward_of(self, saved: SavedRun, gradients: Gradients) -> list[torch.Tensor | None]:
        """Run the backward of one run of layers; return the gradients of its input's leaves."""
        edges: list[GradientEdge] = []
        given: list[torch.Tensor] = []
        for edge, gradient in (*zip(saved.edges, gradients, strict=True), *saved.starts):
            if edge is not None and gradient is not None:
                edges.append(edge)
                given.append(gradient)
        if edges:
            moving: list[tuple[Layer, list[FoundBuffer]]] = []
            for layer in saved.runner.buffered:
                if layer.buffers.move and layer.index in self.stage.layers:
                    moving.append((layer, layer.buffers.moving()))
            random = self.stage.random
            with random.backward(lets_go=self._peers is not None):
                if self._backward_draws.looks:
                    with self._backward_draws.refused(saved.runner):
                        accumulate_gradients(edges, given)
                else:
                    accumulate_gradients(edges, given)
            self.stage.gradients.unshare()
            for layer, buffers in moving:
                layer.warn_of_backward(buffers)
        return [leaf.grad for leaf in saved.leaves]

    def _look_for_outsiders(self, saved: Saved) -> None:
        """Look at the graphs of one micro-batch in each of the first steps."""
        if self._outsiders is None or self._looked_in == self._num_begun:
            return
        self._looked_in, self._num_looked = self._num_begun, self._num_looked + 1
        loss_fn = self._loss[0] if self._loss is not None else None
        for each in saved.runs:
            edges = [edge for edge in each.edges if edge is not None]
            edges += [edge for edge, _ in each.starts]
            self._outsiders.check(edges, f"stage {self.stage.index}", loss_fn)

    def weights(self, microbatch: int) -> bool:
        """Run W; False if there was nothing left to do."""
        deferred = self._deferred.pop(microbatch, None)
        if deferred is not None:
            with self._backward_draws.refused_in_weights(self.stage.whole):
                deferred.run()
            self.stage.gradients.unshare()
            if self.stage.squares is not None:
                self.stage.squares.note(microbatch, is_last=True)
        return deferred is not None

    def offload(self, microbatch: int) -> None:
        """Start moving what is kept of a micro-batch to the host."""
        host = self.saved[microbatch].host
        if host is not None:
            host.offload()

    def fetch(self, microbatch: int) -> None:
        """Start moving it back."""
        host = self.saved[microbatch].host
        if host is not None:
            host.fetch()

    def _host_copy(self) -> HostCopy:
        assert self._room is not None, "made for every table with OFFLOAD"
        return HostCopy(self._lasting_tensors(), self.stage.device, self._room)

    def _lasting_tensors(self) -> list[torch.Tensor]:
        modules = self.stage.layers.values()
        return [t for module in modules for t in (*module.parameters(), *module.buffers())]

    def _left(self, state: State, is_end: bool) -> list[torch.Tensor]:
        """Return what of an output gradients come back for, in their order."""
        if not (is_end and self._is_parted):
            return _tensors(state)
        if self._is_last:
            return []
        return [each for part in self.stage.routes.scatter(state) for each in tensors_of(part)]

    def _places_in_buffers(self, state: State, returned: Sequence[ReturnedBuffer]) -> Sequence[int]:
        """Return which tensors of a state lie in buffers or frozen parameters, by position.

        Also in those of earlier stages. In the first steps; of several tensors, as one alone is
        never more than read.
        """
        tensors = _tensors(state) if self._num_begun <= NUM_LOOKED else []
        if len(tensors) < 2:
            return ()
        held = storages_of([each.tensor for each in returned])
        held |= storages_of([each for each in self._lasting_tensors() if not each.requires_grad])
        return [
            at for at, each in enumerate(tensors) if is_buffer(each) or held & storages_of([each])
        ]

    def _refuse_subclasses(self, left: State, runner: LayerRunner) -> None:
        """Refuse tensors for other ranks that are of a class of their own.

        They would arrive as plain ones. Here, as not all of them keep their class when detached.
        """
        for tensor in left.tensors():
            kind = type(tensor)
            is_plain = kind is torch.Tensor or kind is nn.Parameter
            if not is_plain and not tensor.is_nested:  # the boundary refuses those by that name
                raise ModelError(
                    f"{runner.where}: expected plain tensors for the stages of other ranks, got a "
                    f"{kind.__module__}.{kind.__qualname__} of shape {tuple(tensor.shape)}, which "
                    f"would arrive as a torch.Tensor, without what its class does; let the layer "
                    f"return tensor.as_subclass(torch.Tensor), or put the layers that need the "
                    f"class into one stage"
                )

    def _written(self, microbatch: int) -> ModelError:
        layers = self.stage.layers
        return ModelError(
            f"stage {self.stage.index} (layers {min(layers)} to {max(layers)}): expected the input "
            f"of micro-batch {microbatch} as it was in its forward, got it written to since; let "
            f"the layer or hook that keeps it keep a copy (clone)"
        )


def _starts(run: Run, losses: Sequence[torch.Tensor]) -> list[tuple[GradientEdge, torch.Tensor]]:
    """Return where a backward begins besides the output, each with its gradient."""
    return [(_edge_of(loss), run.gradient_of(loss)) for loss in losses if loss.requires_grad]


def _edge_of(tensor: torch.Tensor) -> GradientEdge:
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return edge_of(tensor)
    return GradientEdge(node, tensor.output_nr)


def _tensors(state: State) -> list[torch.Tensor]:
    if isinstance(state.nest, torch.Tensor) and not state.stashed:
        return [state.nest]
    return state.tensors()


def _map(function: Callable[[torch.Tensor], torch.Tensor], state: State) -> State:
    if isinstance(state.nest, torch.Tensor) and not state.stashed:
        return State(function(state.nest), {})
    return state.map(function)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Say whether nobody but the caller's one tensor refers to its memory, as far as is known."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True
    memory = tensor.untyped_storage()
    return memory.resizable() and storage_use_count(memory._cdata) == _ALONE


def _with_marks(state: State, buffers: Sequence[int]) -> State:
    """Mark tensors that lie in buffers, but not those that a layer has computed with a graph."""
    tensors = state.tensors() if buffers else []
    for place in buffers:
        if not tensors[place].requires_grad:
            mark_buffer(tensors[place])
    return state
