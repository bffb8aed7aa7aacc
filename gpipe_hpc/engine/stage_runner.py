"""Run one stage's share of a step: forward, recomputation and backward of each micro-batch.

                     input                               gradient of the output
    F  layers.run  ->  |  -> output, leaves               |  B  autograd from `edges`
                       v                                  v
                  saved[microbatch]  ....................  gradients of `leaves`

A forward in training keeps autograd's graph. With recomputation (GPipe's trade) it keeps only the
input, and R builds the graph just before B needs it. A backward can be split: I computes the
gradients of the input, W those of the weights.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from gpipe_hpc.batches import Output
from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.engine.backward import Deferred, accumulate_gradients, edge_of
from gpipe_hpc.engine.backward_draws import BackwardDraws
from gpipe_hpc.engine.buffers import FoundBuffer, ReturnedBuffer
from gpipe_hpc.engine.inputs import Intake, State
from gpipe_hpc.engine.layer_runner import (
    NOTHING_AROUND,
    ForwardOptions,
    ForwardRecord,
    Layer,
    LayerOutput,
    LayerRunner,
    RunMode,
)
from gpipe_hpc.engine.offload import HostCopy, PinnedBufferPool
from gpipe_hpc.engine.outputs import (
    REQUIRES_GRAD,
    RequiresGradTracker,
    copy_if_shared,
    copy_unless_saved,
    places_in_buffers,
    refuse_subclasses,
    with_marks,
)
from gpipe_hpc.engine.outsiders import NUM_LOOKED, ForeignParameters
from gpipe_hpc.engine.precision import StageCasts, casts_keep_their_graph
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage, StageLoss
from gpipe_hpc.engine.wiring import BATCH
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import SumOver, normalising_together
from gpipe_hpc.pytree import Nest, map_tensors, tensors_of
from gpipe_hpc.torch_compat import can_split_backward, storage_use_count

Gradients = Sequence[torch.Tensor | None]
_VERSION: Final = attrgetter("_version")
_ALONE: Final = 2  # references to memory that only one tensor uses: its own, and `_is_alone`'s


class ForwardPlan(NamedTuple):
    """Properties of one forward that follow from the table.

    Args:
        mode: RECORD if the table recomputes the micro-batch, TRAIN if it does not, else EVALUATE.
        splits: The backward runs as I and W.
        offloads: Saved tensors are moved to the host until FETCH.
        shares_casts: Autocast shares casts of weights with all micro-batches of the step.
    """

    mode: RunMode
    splits: bool = False
    offloads: bool = False
    shares_casts: bool = True


class SavedRun(NamedTuple):
    """State of one run of some layers, kept until their backward.

    Args:
        runner: The layers.
        leaves: The tensors of their input that require a gradient.
        edges: Where the backward starts in the graph, one for each gradient of the output. Edges
            instead of tensors, so that the output's memory is free once it is sent.
        starts: Where it starts besides, at losses, each with its first gradient.
        given, record: The input and the record of the forward, for an R; None if there is no R.
        promised: Which outputs of the forward get a gradient.
        versions: The versions of the tensors in `given`.
    """

    runner: LayerRunner
    leaves: list[torch.Tensor]
    edges: Sequence[GradientEdge | None]
    starts: Sequence[tuple[GradientEdge, torch.Tensor]]
    given: State | None = None
    record: ForwardRecord | None = None
    promised: tuple[bool, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(slots=True)
class Saved:
    """State of one micro-batch, kept between its forward and its backward.

    Args:
        num_samples: The number of samples.
        num_leaves: The number of gradients for each source, if there are several.
        deferred: The weight gradients for W, if the backward is split.
        host: The saved tensors that are moved to the host from OFFLOAD to FETCH, if any.
        shares_casts: See `ForwardPlan`.
        runs: One run of all layers; several if only some layers are recomputed.
    """

    num_samples: int
    num_leaves: Sequence[int] = ()
    deferred: Deferred | None = None
    host: HostCopy | None = None
    shares_casts: bool = True
    runs: list[SavedRun] = field(default_factory=list)


class StageRunner:
    """Runs the actions of one stage, and keeps the state of its micro-batches between them.

    An empty micro-batch (no samples) calls no layer and adds nothing.

    Args:
        stage: The stage.
        peers: The ranks over which BatchNorm layers normalise a micro-batch; None for this one.
        intake: Copies targets to the device; created if None.
        pinned: Pinned memory for OFFLOAD; None if the table has no OFFLOAD.
        sends: Whether outputs are sent to other ranks.
        outsiders: The parameters that backwards must not reach.
    """

    def __init__(
        self,
        stage: Stage,
        peers: Group | None = None,
        intake: Intake | None = None,
        pinned: PinnedBufferPool | None = None,
        *,
        sends: bool = False,
        outsiders: ForeignParameters | None = None,
    ) -> None:
        self.stage, self._peers, self._pinned, self._sends = stage, peers, pinned, sends
        self._outsiders = outsiders
        self._loss = StageLoss(stage, intake or Intake(stage.device))
        self.saved: dict[int, Saved] = {}
        self._deferred: dict[int, Deferred] = {}
        routes = stage.routes
        self._is_first = BATCH in routes.sources
        self._is_last = not routes.destinations
        # An input from one source without skips is not joined; an output to one is not split.
        self._is_joined = len(routes.sources) > 1 or any(routes.sources.values())
        self._is_parted = len(routes.destinations) != 1 or any(routes.destinations.values())
        self._parameters = [p for layer in stage.layers.values() for p in layer.parameters()]
        self._casts = StageCasts(stage.precision, stage.device, self._parameters)
        self._has_surroundings = (
            self._casts.is_casting or peers is not None or not casts_keep_their_graph()
        )
        if peers is not None:
            stage.random.seeds_all = True  # a sum over peers cannot run once more on one of them
        self._tracker = RequiresGradTracker()
        # By place: which outputs a graph has saved.
        self._saved_outputs: dict[Hashable, list[bool]] = {}
        self._backward_draws = BackwardDraws(stage.random, stage.whole)
        self._num_begun = 0
        self._num_looked = self._looked_in = 0  # steps with checked graphs, and the last of them

    def begin(self) -> None:
        """Begin a step, or an evaluation."""
        self._num_begun += 1
        self._loss.begin()
        self._casts.begin()
        self.stage.random.begin()
        self._backward_draws.begin()
        self._tracker.begin(self._parameters)
        self.stage.within.begin()

    def end(self) -> None:
        """End a step or an evaluation, also one that failed; release all stored state.

        The user's buffers get their newest values.
        """
        self.saved.clear()
        self._deferred.clear()
        self.stage.within.end()
        self.stage.lasting.settle()
        self._loss.end()

    def refuse_draws(self) -> None:
        """Raise ModelError if a backward of the finished step drew random numbers."""
        self._backward_draws.end()

    @property
    def num_kept(self) -> int:
        """Return the number of micro-batches with saved state."""
        return len(self.saved) + len(self._deferred)

    def forward(
        self,
        run: Run,
        microbatch: int,
        parts: Sequence[Nest],
        num_samples: int,
        plan: ForwardPlan,
        outcome: Outcome,
    ) -> list[Nest]:
        """Run the layers, and the loss after the last one, on the input parts of all sources.

        Returns one part for each destination. Tensors in it that require a gradient get one in B.
        """
        if num_samples == 0:
            if plan.mode is not RunMode.EVALUATE:
                self.saved[microbatch] = Saved(0, [0 for _ in parts] if self._is_joined else ())
            return [None for _ in self.stage.routes.destinations]
        outcome.samples[self.stage.index] += num_samples
        state = self.stage.routes.gather(parts) if self._is_joined else State(parts[0], {})
        if plan.mode is RunMode.EVALUATE:
            return self._evaluate(run, microbatch, num_samples, state, outcome)
        saved = Saved(num_samples, shares_casts=plan.shares_casts)
        if self._is_joined or plan.splits or plan.offloads:
            self._prepare(saved, parts, plan)
        # Usually one run of all layers. If only some are recomputed, each group of consecutive
        # layers is a run.
        stretches = self.stage.runners[plan.mode is RunMode.RECORD]
        for number, (runner, recomputes) in enumerate(stretches):
            forward = self._record if recomputes else self._train
            is_end = number == len(stretches) - 1
            state = forward(run, microbatch, runner, state, saved, outcome, is_end=is_end)
        self.saved[microbatch] = saved
        if self.stage.parameters.compares_values:
            self.stage.parameters.note_forward()
        if self._is_last:
            return []
        return self.stage.routes.scatter(state) if self._is_parted else [state.nest]

    def _prepare(self, saved: Saved, parts: Sequence[Nest], plan: ForwardPlan) -> None:
        """Prepare a forward with several sources, a split backward, or OFFLOAD."""
        if self._is_joined:
            saved.num_leaves = [sum(t.requires_grad for t in tensors_of(part)) for part in parts]
        if plan.offloads:
            assert self._pinned is not None, "made for every table with OFFLOAD"
            saved.host = HostCopy(self._lasting_tensors(), self.stage.device, self._pinned)
        if plan.splits and not self.stage.is_compiled and can_split_backward():
            saved.deferred = Deferred(None if saved.host is None else saved.host.hold)

    def _train(
        self,
        run: Run,
        microbatch: int,
        runner: LayerRunner,
        given: State,
        saved: Saved,
        outcome: Outcome,
        *,
        is_end: bool,
    ) -> State:
        """Run some layers with a graph, which is kept for the backward."""
        tensors = given.tensors()
        leaves = list(filter(REQUIRES_GRAD, tensors))
        options = ForwardOptions(
            RunMode.TRAIN, True, None, saved.shares_casts, saved.deferred, saved.host
        )
        output = self._run(run, microbatch, saved.num_samples, runner, given, options, is_end)
        edges = list(map(_edge_of, filter(REQUIRES_GRAD, self._left(output.state, is_end))))
        starts = _starts(run, output.losses) if output.losses else ()
        saved.runs.append(SavedRun(runner, leaves, edges, starts))
        if saved.host is not None:
            saved.host.hold(leaves)
        state = self._take_results(output, microbatch, outcome)
        if is_end and self._is_last:
            return state
        # The next stage must not keep this graph alive: it gets new leaves.
        is_one = isinstance(state.nest, torch.Tensor) and not state.stashed
        buffers = () if is_one else self._places_in_buffers(state, output.returned)
        state = state.map(_as_leaf)
        if not (is_one and _is_alone(state.nest)):
            ends = [*edges, *(edge for edge, _ in starts)]
            state = copy_unless_saved(state, tensors, runner.place, ends, self._saved_outputs)
            state = with_marks(state, buffers)
        return state

    def _record(
        self,
        run: Run,
        microbatch: int,
        runner: LayerRunner,
        given: State,
        saved: Saved,
        outcome: Outcome,
        *,
        is_end: bool,
    ) -> State:
        """Run some layers that an R will run again, and keep only their input."""
        tensors = given.tensors()
        # On separate leaves: a hook that a layer registers on its input, here or in R, belongs to
        # that run only. Gradients arrive at R's leaves.
        own = given.map(lambda t: t.detach().requires_grad_() if t.requires_grad else t)
        own_tensors = own.tensors()
        # The outputs show which gradients will arrive. To find this out, the first forward of each
        # kind builds a graph, and later ones do not, so outputs are compared in two steps; on an
        # accelerator, where the host waits for the comparison, in the first step only.
        kind = runner.place, *map(REQUIRES_GRAD, own_tensors)
        has_graph = kind not in self._tracker.all_require
        steps = (1,) if self.stage.device.is_accelerator else (1, 2)
        record = ForwardRecord(compares_all=self._num_begun in steps)
        options = ForwardOptions(
            RunMode.RECORD, has_graph, record, saved.shares_casts, None, saved.host
        )
        output = self._run(run, microbatch, saved.num_samples, runner, own, options, is_end)
        state = self._take_results(output, microbatch, outcome)
        leaves_stage = not (is_end and self._is_last)
        promised: tuple[bool, ...] = ()
        if has_graph or leaves_stage:
            flags = self._tracker.flags(kind, own_tensors, state.tensors(), has_graph=has_graph)
        if leaves_stage:
            is_one = type(state.nest) is torch.Tensor and not state.stashed
            buffers = () if is_one else self._places_in_buffers(state, output.returned)
            next_flag = iter(flags).__next__
            state = state.map(lambda tensor: tensor.detach().requires_grad_(next_flag()))
            if not (is_one and _is_alone(state.nest)):
                state = with_marks(copy_if_shared(state, own_tensors), buffers)
            promised = tuple(map(REQUIRES_GRAD, self._left(state, is_end)))
        versions = tuple(map(_VERSION, tensors))
        leaves = list(filter(REQUIRES_GRAD, tensors))
        saved.runs.append(SavedRun(runner, leaves, (), (), given, record, promised, versions))
        if saved.host is not None:
            saved.host.hold(tensors)
        return state

    def _evaluate(
        self, run: Run, microbatch: int, num_samples: int, given: State, outcome: Outcome
    ) -> list[Nest]:
        """Run the layers in evaluation mode, without storing anything for a backward."""
        options = ForwardOptions(RunMode.EVALUATE)
        output = self._run(run, microbatch, num_samples, self.stage.whole, given, options, True)
        state = self._take_results(output, microbatch, outcome)
        if output.term is not None:
            return []
        if self._is_last:
            # Copied, as the last layer may write into it again for the next micro-batch.
            copied = map_tensors(lambda tensor: tensor.detach().clone(), state.nest)
            outcome.outputs[microbatch] = Output(copied, num_samples)
            return []
        state = state.map(_as_leaf)  # releases the first tensors, whose references are counted
        return self.stage.routes.scatter(copy_if_shared(state, given.tensors()))

    def _take_results(self, output: LayerOutput, microbatch: int, outcome: Outcome) -> State:
        """Store loss and reports of a run without their graphs; return its output.

        The output is removed from `output`, as references to its memory are counted afterwards.
        """
        if output.term is not None:
            outcome.losses[microbatch] = output.term.without_graph()
        if output.noted:
            noted = [each.without_graph() for each in output.noted]
            outcome.noted[microbatch] += noted
            statistics = [pair for each in noted for pair in each.reports.statistics]
            self.stage.statistics.note(microbatch, statistics)
        state, output.state = output.state, State(None, {})
        return state

    def recompute(self, run: Run, microbatch: int) -> bool:
        """Run the recomputed layers again, with a graph; return whether there were any."""
        saved = self.saved[microbatch]
        has_run = False
        if saved.host is not None:
            saved.host.wait()
        parameters = self.stage.parameters
        for number, each in enumerate(saved.runs):
            if each.given is None:
                continue
            for tensor, version in zip(each.given.tensors(), each.versions, strict=True):
                if tensor._version != version:
                    raise ModelError(
                        f"{self.stage.whole.where}: the input of micro-batch {microbatch} was "
                        f"modified in place after its forward, expected it unchanged for the "
                        f"recomputation; store a copy (clone) in the layer or hook that modifies it"
                    )
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
        """Run layers, and the loss after the last layer of the model."""
        loss = self._loss.of(run, microbatch, num_samples) if is_end and self._is_last else None
        shards = self.stage.gradients.shards
        if shards is not None and shards.is_gathering:
            options = options._replace(wait_for_layer=shards.wait_for_layer)
        around = NOTHING_AROUND
        if self._has_surroundings or options.host is not None:
            around = self._around(runner, options)
        if self._casts.is_casting:
            # Autocast caches casts of leaves until the step ends; only those of weights should.
            given = given.map(lambda t: t.view_as(t) if t.requires_grad and t.is_leaf else t)
        output = runner.run(given, run.keys(microbatch), options, loss, around)
        is_one = type(output.state.nest) is torch.Tensor and not output.state.stashed
        if is_end and self._sends and not is_one:
            refuse_subclasses(output.state, runner.where)
        return output

    @contextmanager
    def _around(self, runner: LayerRunner, options: ForwardOptions) -> Iterator[None]:
        """Return the context for layers: autocast, offloading, BatchNorm over several ranks."""
        if not casts_keep_their_graph():
            # If the user has an autocast block around the whole step, casts of a forward without a
            # graph would be used in the recomputation: so each forward casts its weights itself.
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
        assert self._peers is not None, "used only with peers"
        return self.stage.sum_over(self._peers)

    def backward(self, microbatch: int, gradients: Gradients) -> list[Gradients]:
        """Run B or I: accumulate parameter gradients; return the input gradients for each source.

        If the backward is split, most parameter gradients are left to `weights`.
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
        """Run the backward of one run of layers; return the gradients of its input leaves."""
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
        """Check graphs for foreign parameters, for one micro-batch in each of the first steps."""
        if self._outsiders is None or self._looked_in == self._num_begun:
            return
        self._looked_in, self._num_looked = self._num_begun, self._num_looked + 1
        for each in saved.runs:
            edges = [edge for edge in each.edges if edge is not None]
            edges += [edge for edge, _ in each.starts]
            self._outsiders.check(edges, f"stage {self.stage.index}", self._loss.function)

    def weights(self, microbatch: int) -> bool:
        """Run W; return whether weight gradients were left to compute."""
        deferred = self._deferred.pop(microbatch, None)
        if deferred is not None:
            with self._backward_draws.refused_in_weights(self.stage.whole):
                deferred.run()
            self.stage.gradients.unshare()
            if self.stage.squares is not None:
                self.stage.squares.note(microbatch, is_last=True)
        return deferred is not None

    def offload(self, microbatch: int) -> None:
        """Start moving the saved tensors of a micro-batch to the host."""
        host = self.saved[microbatch].host
        if host is not None:
            host.offload()

    def fetch(self, microbatch: int) -> None:
        """Start moving the saved tensors of a micro-batch back to the device."""
        host = self.saved[microbatch].host
        if host is not None:
            host.fetch()

    def _lasting_tensors(self) -> list[torch.Tensor]:
        modules = self.stage.layers.values()
        return [t for module in modules for t in (*module.parameters(), *module.buffers())]

    def _left(self, state: State, is_end: bool) -> list[torch.Tensor]:
        """Return the output tensors that may get gradients, in the order of these gradients."""
        if not (is_end and self._is_parted):
            return state.tensors()
        if self._is_last:
            return []
        return [each for part in self.stage.routes.scatter(state) for each in tensors_of(part)]

    def _places_in_buffers(self, state: State, returned: Sequence[ReturnedBuffer]) -> Sequence[int]:
        """Return the positions of outputs in memory of buffers or frozen parameters.

        Empty after the first steps.
        """
        if self._num_begun > NUM_LOOKED:
            return ()
        frozen = [each for each in self._lasting_tensors() if not each.requires_grad]
        return places_in_buffers(state, [*(each.tensor for each in returned), *frozen])


def _starts(run: Run, losses: Sequence[torch.Tensor]) -> list[tuple[GradientEdge, torch.Tensor]]:
    """Return the edges at which a backward starts from losses, each with its first gradient."""
    # A new gradient each time, as the user's loss may write into it.
    seed = run.seed
    return [
        (_edge_of(loss), torch.ones_like(loss) if seed is None else seed.to(loss.dtype, copy=True))
        for loss in losses
        if loss.requires_grad
    ]


def _edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return the same as `edge_of`, which is called for unusual tensors only."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return edge_of(tensor)
    return GradientEdge(node, tensor.output_nr)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor is known to use this tensor's memory.

    The caller must hold no other tensor or storage of that memory.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True
    memory = tensor.untyped_storage()
    return memory.resizable() and storage_use_count(memory._cdata) == _ALONE
