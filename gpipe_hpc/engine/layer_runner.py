"""Run consecutive layers so that random numbers and buffers do not depend on the layout.

    plain layer       seed torch's generators, call the module
    any other layer   seed all generators that it draws from, replace buffers that it may change by
                      copies, call the module, detect which numbers it drew and buffers it changed

A plain layer draws at most from torch's generators, and has no buffers and no skips. The first
forward of a layer shows whether it is plain. Later, one layer every few runs is inspected again,
and Python's and NumPy's generators are compared after each run, as a layer may begin to draw.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.backward import Deferred, DeferWeights
from gpipe_hpc.engine.buffers import (
    NO_BUFFERS,
    BuffersBefore,
    FoundBuffer,
    Home,
    LayerBuffers,
    PersistentBuffers,
    ReturnedBuffer,
)
from gpipe_hpc.engine.inputs import InputGuard, State, refuse_astray
from gpipe_hpc.engine.loss import LayerReports, LossTerm
from gpipe_hpc.engine.offload import HostCopy
from gpipe_hpc.engine.parameters import Sketch, difference, sketch_of
from gpipe_hpc.engine.random_state import (
    NOTHING_DRAWN,
    Drawn,
    DrawsFrom,
    RandomState,
    own_generators,
)
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import CURRENT_REPORTS, Reports, SkipNames, run_layer
from gpipe_hpc.pytree import Nest

log = logging.getLogger("gpipe_hpc.pipeline")

LayerKey = Callable[[int], int]
"""Returns the random key of a layer, given its global index, for one micro-batch."""

Around = AbstractContextManager[object]
"""The context that layers run in: autocast, BatchNorm over several ranks, offloading."""

_IS_TRAINING: Final = attrgetter("training")
_EVERY: Final = 4  # runs of a stage after which one layer is inspected again
NOTHING_AROUND: Final[Around] = nullcontext()
ASTRAY: Final = "return the output on the device of the input"


class RunMode(Enum):
    """The state that a run of layers keeps."""

    EVALUATE = "evaluate"  # none; layers change their buffers as in plain torch
    TRAIN = "train"  # autograd's graph, for the backward
    RECORD = "record"  # no graph, but the state that a REPLAY needs to repeat the run
    REPLAY = "replay"  # the graph of a recomputation; buffers do not change


class Layer:
    """One layer of the model: its module, the generators that it draws from, and its buffers.

    The loss runs as the layer after the last one.

    Args:
        index: The global index of the layer, on which its random key depends.
        module: The module.
        where: The name of the layer in messages.
        random: The generators of its stage.
        lasting: The original buffers of its stage.
        names: The skip values that the layer stashes and pops.
        sharing: Buffer dicts of other layers of the stage that contain one of the same tensors.
        elsewhere: Buffers by name that a layer of another stage, given by its index, shares.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        where: str,
        random: RandomState,
        lasting: PersistentBuffers,
        *,
        names: SkipNames | None = None,
        sharing: Sequence[tuple[str, Home]] = (),
        elsewhere: Mapping[str, int] | None = None,
    ) -> None:
        self.index, self.module, self.where = index, module, where
        self.call: Callable[..., Any] = module
        """Runs the layer: the module itself, or the compiled module."""
        self._names = names or SkipNames()
        self.has_skips = bool(self._names.stashes or self._names.pops)
        self._random, self._lasting, self._elsewhere = random, lasting, elsewhere
        self._seeded = {id(generator) for generator in random.generators}
        self._has_warned = False
        self.renew(sharing)

    def renew(self, sharing: Sequence[tuple[str, Home]]) -> None:
        """Search the layer for buffers and generators, and discard earlier results."""
        self.buffers = LayerBuffers(
            self.module, self.where, self._lasting, sharing, self._elsewhere
        )
        own = own_generators(self.module, self._seeded)
        self._draws = {True: DrawsFrom(own), False: DrawsFrom(own)}
        self._random.num_learned += 1

    @property
    def draws_from(self) -> DrawsFrom:
        """Return the generators that the layer is known to draw from in its present mode."""
        return self._draws[self.module.training]

    def look_for_generators(self) -> None:
        """Search the layer for generators again, as some are created in the first forward."""
        self.draws_from.own = own_generators(self.module, self._seeded)

    def with_skips(self, stashed: dict[str, Nest]) -> Callable[[Nest], Nest]:
        """Return a call that runs the layer and moves its skip values from and to `stashed`."""
        place = f"layers.{self.index}"
        return lambda nest: run_layer(self.call, self._names, nest, stashed, place)

    def warn_of_backward(self, found: Sequence[FoundBuffer]) -> None:
        """Warn if buffers that forwards change have also changed in a backward."""
        changed = self.buffers.changes(found)
        if changed:
            self.warn(
                f"buffer {changed} was changed in a backward; only forwards may change it, because "
                f"each micro-batch has its own copy. If torch.utils.checkpoint in the layer runs "
                f"the forward again, use recompute=always instead"
            )

    def warn(self, message: str) -> None:
        """Log a warning that names the layer, only once."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: %s", self.where, message)


class LayerTrace(NamedTuple):
    """State of one layer's forward that its recomputation needs.

    Args:
        before: The buffers before the forward.
        drawn: Hashes of the generators' states after it, if the layer draws.
        output: A sketch of the output, if it is compared.
    """

    before: BuffersBefore = NO_BUFFERS
    drawn: Drawn = NOTHING_DRAWN
    output: Sketch | None = None


_NO_TRACE: Final = LayerTrace()  # of a plain layer


class ForwardRecord:
    """State of a forward of some layers that their recomputation needs.

    `compares_all`: outputs of all layers are compared with those of the recomputation, not only of
    layers that draw from Python's or NumPy's generators.
    """

    __slots__ = ("compares_all", "differs", "traces")

    def __init__(self, *, compares_all: bool) -> None:
        self.compares_all, self.differs = compares_all, False
        self.traces: dict[int, LayerTrace] = {}


class ForwardOptions(NamedTuple):
    """Options of one run of layers.

    Args:
        mode: The state that the run keeps.
        has_graph: Whether autograd builds a graph.
        record: The record to fill (RECORD) or to compare with (REPLAY); else None.
        shares_casts: Whether autocast shares casts of weights with other runs of the step.
        deferred: Collects weight gradients, for a split backward.
        host: Collects the tensors that autograd saves, to move them to the host.
        wait_for_layer: Waits until the parameters of a layer, given by its index, are gathered.
    """

    mode: RunMode
    has_graph: bool = False
    record: ForwardRecord | None = None
    shares_casts: bool = True
    deferred: Deferred | None = None
    host: HostCopy | None = None
    wait_for_layer: Callable[[int], None] | None = None


Loss = tuple[Layer, Callable[[Nest], LossTerm]]
"""The loss as the layer after the last one, and its call, which takes the last layer's output."""


class LayerOutput:
    """Results of one run of layers.

    Attributes:
        state: The output, and the skip values for later stages.
        noted: Losses and metrics that layers added.
        term: The loss of the micro-batch, on the last stage.
        losses: Tensors at which a backward starts besides the output.
        changes: Layers with buffers, and their buffers before the run.
        returned: Buffers whose memory the output of a layer uses.
    """

    __slots__ = ("changes", "losses", "noted", "returned", "state", "term")

    def __init__(self) -> None:
        self.state: State
        self.noted: list[LayerReports] = []
        self.term: LossTerm | None = None
        self.losses: list[torch.Tensor] = []
        self.changes: list[tuple[Layer, BuffersBefore]] = []
        self.returned: list[ReturnedBuffer] = []


class LayerRunner:
    """Runs consecutive layers of one stage in their order; a stage may have none.

    The input is never written to: layers that write in place get a copy. The loss may run after the
    layers, as one more layer.
    """

    def __init__(
        self, stage: int, layers: Sequence[Layer], random: RandomState, device: Device
    ) -> None:
        self.layers = tuple(layers)
        self._stage, self._random, self._device = stage, random, device
        self._indices = tuple(layer.index for layer in layers)
        self._guard = InputGuard(self.where, self._indices[0] if self._indices else 0)
        # Results of `_look_up`, and the state in which they are valid.
        self._loss: Layer | None = None
        self._members: tuple[Layer, ...] = self.layers
        self._modules = [layer.module for layer in layers]
        self._training: list[bool] = []
        self._is_training = False
        self._num_learned, self._num_runs = -1, 0
        self._plain: dict[RunMode, list[bool]] = {}
        self._empty: list[Home] = []  # buffer dicts of layers that had no buffers
        self._draws_torch = self._draws_process = False
        self.buffered: tuple[Layer, ...] = ()

    @property
    def where(self) -> str:
        """Return the name of these layers in messages."""
        if not self._indices:
            return f"stage {self._stage}"
        return f"stage {self._stage} (layers {self._indices[0]} to {self._indices[-1]})"

    @property
    def place(self) -> tuple[tuple[int, ...], bool]:
        """Return a key for these layers and their mode: indices, and whether any is in training."""
        return self._indices, any(map(_IS_TRAINING, self._modules[: len(self.layers)]))

    def run(
        self,
        given: State,
        keys: LayerKey,
        options: ForwardOptions,
        loss: Loss | None = None,
        around: Around = NOTHING_AROUND,
    ) -> LayerOutput:
        """Run the layers, and the loss after them, on one micro-batch.

        If a layer has begun to draw from Python's or NumPy's generator, its numbers depended on
        earlier draws. Then the layers run once more, with all generators seeded for each. This
        shows which layer draws, and from now on its generators are seeded.
        """
        self._look_up(None if loss is None else loss[0])
        random, has_graph = self._random, options.has_graph
        is_set = torch.is_grad_enabled() is has_graph
        with NOTHING_AROUND if is_set else torch.set_grad_enabled(has_graph), around, random:
            if self._draws_torch or self._draws_process:
                random.look_for_others(torchs=self._draws_torch, process=self._draws_process)
            output = self._run_once(given, keys, options, loss)
            if random.has_moved():
                known = self._forget_draws()
                if self._undo(output.changes, options):
                    del output  # its memory is free for the second run
                    output = self._run_once(given, keys, options, loss)
                random.end_search(has_found=known != self._known_draws())
        for each in output.returned:
            each.refuse_writes()
        if random.was_disturbed and options.mode is RunMode.TRAIN:
            self._warn_of_others()
        return output

    def _look_up(self, loss: Layer | None) -> None:
        """Determine which layers are plain, if that may have changed since the last run."""
        if loss is not self._loss:
            self._loss = loss
            self._members = self.layers if loss is None else (*self.layers, loss)
            self._modules = [layer.module for layer in self._members]
            self._num_learned = -1
        training = list(map(_IS_TRAINING, self._modules))
        num_learned = self._random.num_learned
        is_known = num_learned == self._num_learned and training == self._training
        if is_known and not (self._empty and any(self._empty)):
            return
        self._training, self._num_learned = training, num_learned
        self._is_training = any(training[: len(self.layers)])
        draws = [layer.draws_from for layer in self._members]
        self.buffered = tuple([layer for layer in self._members if layer.buffers.exist])
        self._empty = [
            home
            for layer in self._members
            if not layer.buffers.exist
            for home in layer.buffers.homes
        ]
        self._draws_torch = any(each.torch for each in draws)
        self._draws_process = any(d.python or d.numpy or not d.is_known for d in draws)
        only_torch = [
            each.only_torch and not layer.has_skips and not self._random.seeds_all
            for each, layer in zip(draws, self._members, strict=True)
        ]
        is_plain = [
            is_so and layer not in self.buffered
            for is_so, layer in zip(only_torch, self._members, strict=True)
        ]
        # A recomputation compares the draws of layers, so layers that draw need a record.
        draws_nothing = [is_so and not d.torch for is_so, d in zip(is_plain, draws, strict=True)]
        self._plain = {
            RunMode.EVALUATE: only_torch,
            RunMode.TRAIN: is_plain,
            RunMode.RECORD: draws_nothing,
            RunMode.REPLAY: draws_nothing,
        }

    def _run_once(
        self, given: State, keys: LayerKey, options: ForwardOptions, loss: Loss | None
    ) -> LayerOutput:
        output, reports, guard = LayerOutput(), Reports(), self._guard
        plain, seeds = self._plain[options.mode], self._random.seeds
        if options.record is not None:
            options.record.differs = False
            if options.record.compares_all:
                plain = [False] * len(plain)
        # Inspect one layer every few runs, as it may have begun to draw from torch's generators.
        self._num_runs += 1
        inspected = -1
        if self._num_runs % _EVERY == 0 and plain:
            inspected = self._num_runs // _EVERY % len(plain)
            plain = [*plain[:inspected], False, *plain[inspected + 1 :]]
        wait_for_layer, deferred = options.wait_for_layer, options.deferred
        token = CURRENT_REPORTS.set(reports)
        splits: Any = None
        if deferred is not None:
            deferred.is_in_forward = True
            splits = DeferWeights(deferred)
            splits.__enter__()
        try:
            nest, stashed = guard.protect(
                given, has_graph=options.has_graph, is_training=self._is_training
            )
            for place, layer in enumerate(self.layers):
                if wait_for_layer is not None:
                    wait_for_layer(layer.index)
                key = keys(layer.index)
                if plain[place] and not stashed:
                    for seed in seeds:
                        seed(key)
                    try:
                        nest = layer.call(nest)
                    except Exception as error:
                        error.add_note(layer.where)
                        raise
                else:
                    call = layer.with_skips(stashed) if stashed or layer.has_skips else layer.call
                    inspects = place == inspected
                    nest = self._run_stateful(layer, call, nest, key, options, output, inspects)
                if guard.shares_memory:
                    guard.refuse_shared(layer.where)
                if reports.losses or reports.metrics or reports.statistics:
                    _take_reports(layer, reports, output)
            guard.refuse_writes()
            if self._device.is_accelerator:
                refuse_astray((nest, stashed), self._device, self.where, ASTRAY, ModelError)
            if splits is not None:  # the backward of the loss is not split
                splits, _ = None, splits.__exit__(None, None, None)
            if loss is not None:
                layer, call = loss
                key = keys(layer.index)
                if plain[-1]:
                    for seed in seeds:
                        seed(key)
                    term = call(nest)
                else:
                    inspects = inspected == len(self.layers)
                    term = self._run_stateful(layer, call, nest, key, options, output, inspects)
                output.term = term
                output.losses.append(term.total)
                if reports.losses or reports.metrics or reports.statistics:
                    _take_reports(layer, reports, output)
        finally:
            guard.forget()
            if splits is not None:
                splits.__exit__(None, None, None)
            if deferred is not None:
                deferred.is_in_forward = False
            CURRENT_REPORTS.reset(token)
        output.state = State(nest, stashed)
        return output

    def _run_stateful(
        self,
        layer: Layer,
        call: Callable[[Nest], Any],
        nest: Nest,
        key: int,
        options: ForwardOptions,
        output: LayerOutput,
        inspects: bool,
    ) -> Any:
        """Run a layer that has buffers or skips, or that may draw random numbers."""
        mode, record, draws = options.mode, options.record, layer.draws_from
        returns, was_known, homes = mode is RunMode.RECORD, draws.is_known, layer.buffers.homes
        trace, before, as_recorded = _NO_TRACE, NO_BUFFERS, NOTHING_AROUND
        if mode is RunMode.REPLAY and record is not None:
            trace = record.traces.get(layer.index, _NO_TRACE)
            if trace.before is not NO_BUFFERS or any(homes):
                as_recorded = layer.buffers.again(trace.before)
        elif mode is not RunMode.EVALUATE and any(homes):
            before = layer.buffers.begin()
        with as_recorded:
            block = self._random.seed(key, draws, inspects=inspects)
            try:
                with block:
                    made = call(nest)
            except Exception as error:
                if layer is not self._loss:  # which names itself
                    error.add_note(layer.where)
                raise
            drawn = self._random.finish(draws, measures=record is not None)
            if not was_known:
                layer.look_for_generators()
        tensors = made.total if isinstance(made, LossTerm) else made
        if mode in (RunMode.TRAIN, RunMode.RECORD) and (before is not NO_BUFFERS or any(homes)):
            before = layer.buffers.end(before, returns=returns)
            output.changes.append((layer, before))
            output.returned += layer.buffers.returned(before, tensors, returns=returns)
        if mode is RunMode.RECORD and record is not None:
            # It is not certain whether a layer draws from Python's and NumPy's generators.
            compares = record.compares_all or drawn[1:] != (None, None)
            sketch = sketch_of(tensors) if compares else None
            record.traces[layer.index] = LayerTrace(before, drawn, sketch)
        elif mode is RunMode.REPLAY and record is not None:
            _compare(layer, record, trace, drawn, tensors)
        return made

    def _undo(
        self, changes: Sequence[tuple[Layer, BuffersBefore]], options: ForwardOptions
    ) -> bool:
        """Restore the buffers from before a run; return False if that is impossible."""
        if options.mode is RunMode.EVALUATE and self.buffered:
            return False
        if not all(layer.buffers.can_restore(before) for layer, before in changes):
            return False
        for layer, before in reversed(changes):
            layer.buffers.restore(before)
        if options.host is not None:
            options.host.forget()
        return True

    def _known_draws(self) -> list[tuple[bool, bool]]:
        """Return for each layer whether it draws from Python's and from NumPy's generator."""
        draws = [layer.draws_from for layer in self._members]
        return [(each.python, each.numpy) for each in draws]

    def _forget_draws(self) -> list[tuple[bool, bool]]:
        """Let the next run detect again which generators layers use; return `_known_draws`."""
        for layer in self._members:
            layer.draws_from.is_known = False
        self._random.num_learned += 1
        self._look_up(self._loss)
        return self._known_draws()

    def _warn_of_others(self) -> None:
        """Warn that other code draws from torch's generators, if a layer draws from them too."""
        for layer in self._members:
            if layer.draws_from.torch:
                layer.warn(
                    "draws from torch's default generator, from which other code (another thread, "
                    "or a hook in a backward) also draws during a step, so the random numbers of "
                    "the layer depend on timing; give the other code a torch.Generator of its own"
                )
                return


def _compare(
    layer: Layer, record: ForwardRecord, trace: LayerTrace, drawn: Drawn, output: Nest
) -> None:
    """Compare a recomputation with its forward: the random numbers drawn, and the output.

    Raises ModelError if other numbers were drawn. Another output alone logs a warning, once in a
    run, as the layers after it get another input.
    """
    apart = 0.0
    if trace.output is not None and not record.differs:
        apart = difference(trace.output, sketch_of(output))
    sources = (
        ("torch's", "torch.Generator()", layer.draws_from.torch),
        ("Python's", "random.Random()", apart > 0),
        ("NumPy's", "numpy.random.default_rng()", apart > 0),
    )
    for (whose, remedy, counts), one, other in zip(sources, trace.drawn, drawn, strict=True):
        if counts and one is not None and other is not None and one != other:
            raise ModelError(
                f"{layer.where}: recomputation drew other random numbers than the forward, so "
                f"gradients would not match it. If another thread draws from {whose} default "
                f"generator, give it a generator of its own, {remedy}; if the number of draws "
                f"depends on state of the layer, keep that state in a buffer"
            )
    if apart > 0:
        record.differs = True
        layer.warn(
            f"recomputation gave a different output (relative difference {apart:.1e}) from the "
            f"same input, buffers and random numbers, so gradients do not match the forward; "
            f"keep all state that a forward changes in buffers, or use recompute=never"
        )


def _take_reports(layer: Layer, reports: Reports, output: LayerOutput) -> None:
    output.losses += reports.losses.values()
    output.noted.append(LayerReports(layer.index, reports.take()))
