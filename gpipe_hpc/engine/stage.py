"""One stage: its layers, their parameters and buffers by global name, and the loss after them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.data_parallel import GradientBuckets, OwnedParameter
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.batchnorm_statistics import StageStatistics
from gpipe_hpc.engine.buffers import Home, PersistentBuffers, buffer_dicts_of
from gpipe_hpc.engine.gradient_norms import (
    MICROBATCHES,
    CopySquaredNorms,
    MicrobatchSquaredNorms,
)
from gpipe_hpc.engine.inputs import Intake, refuse_astray
from gpipe_hpc.engine.layer_runner import ASTRAY, Layer, LayerRunner, Loss
from gpipe_hpc.engine.loss import LossTerm, LossWatch, has_graph, loss_term, refuse_constant
from gpipe_hpc.engine.outsiders import NUM_LOOKED
from gpipe_hpc.engine.parameters import StageParameters
from gpipe_hpc.engine.random_state import RandomState
from gpipe_hpc.engine.run import Run
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.errors import DataError, GpipeError, ModelError
from gpipe_hpc.models import (
    Conversion,
    LossFunction,
    PipelineStep,
    PooledBatchNorm,
    Reductions,
    SkipNames,
    SumOver,
    Tie,
    TorchLoss,
    convert_batchnorm,
    global_name,
    named_layer_parameters,
    torch_loss,
)
from gpipe_hpc.pytree import Nest


class Stage:
    """Contiguous layers that are placed together, and their state.

    Args:
        index: The number of the stage.
        layers: Each layer's module by global index, ascending.
        device: Where the layers run.
        routes: The stages that inputs come from and outputs go to.
        names: The skip values that each layer stashes and pops.
        ties: The tied parameters of the model.
        precision: The precision of forwards, see `casting`.
        recomputed: The layers that an ``R`` runs again if the table has one; None for all.
        elsewhere: For each layer its buffers that a layer of another stage, given by index, shares.
    """

    def __init__(
        self,
        index: int,
        layers: Mapping[int, nn.Module],
        device: Device,
        routes: StageRoutes,
        *,
        names: Mapping[int, SkipNames] | None = None,
        ties: Sequence[Tie] = (),
        precision: str = "float32",
        recomputed: frozenset[int] | None = None,
        elsewhere: Mapping[int, Mapping[str, int]] | None = None,
    ) -> None:
        self.precision = precision
        self.index = index
        self.layers = dict(layers)
        self.device = device
        self._aliases = {
            global_name(*place): tie.name
            for tie in ties
            for place in tie.places
            if place[0] in self.layers
        }
        named = self.named_parameters()
        self.tied = {name: named[name] for name in set(self._aliases.values())}
        own = {name: p for name, p in named.items() if name not in self.tied}
        layer_of = {
            name: layer
            for layer, module in self.layers.items()
            for name, _ in named_layer_parameters(layer, module)
        }
        self.gradients = GradientBuckets(own, device, layer_of)
        self.parameters = StageParameters(self.layers, named, device)
        self.squares: MicrobatchSquaredNorms | CopySquaredNorms | None = None
        converted = [convert_batchnorm(m, f"layers.{i}") for i, m in self.layers.items()]
        self.batchnorm = Conversion.of(converted)
        self.within = PipelineStep()
        for layer in self.layers.values():
            for part in layer.modules():
                if isinstance(part, PooledBatchNorm):
                    part.within = self.within
        self.statistics = StageStatistics(self.layers.values())
        self.routes = routes
        self.recomputed = recomputed
        self.random = RandomState(device)
        self.lasting = PersistentBuffers()
        self.is_compiled = False
        self.loss_watch: LossWatch | None = None  # for training and evaluation
        self._elsewhere = elsewhere or {}
        self._placed = self._place_layers(names or {})
        self.whole = self._runner(self.layers)
        # Consecutive layers with one runner each, and whether an R runs them again: for forwards
        # without recomputation, and with it. One runner if nothing or everything is recomputed.
        self.runners = {False: ((self.whole, False),), True: self._cut_runners()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this stage's parameters by global name, each once.

        A tied one has the name of its first place, which may be on another stage.
        """
        named: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for index, layer in self.layers.items():
            for name, parameter in named_layer_parameters(index, layer):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named[self._aliases.get(name, name)] = parameter
        return named

    def owned_parameters(self) -> dict[str, OwnedParameter]:
        """Return the parameters, or their shards, that this rank updates, by global name."""
        tied = {name: OwnedParameter.full(parameter) for name, parameter in self.tied.items()}
        return self.gradients.owned() | tied

    def owns(self, name: str) -> bool:
        """Return whether a parameter of the stage has its first or only place here."""
        return name not in self.tied or name in self._aliases

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that a checkpoint stores, by global name."""
        named: dict[str, torch.Tensor] = {}
        for index, layer in self.layers.items():
            kept = layer.state_dict().keys()
            for name, buffer in layer.named_buffers():
                if name in kept:
                    named[global_name(index, name)] = buffer
        return named

    def measure_parts(self, parts: str, microbatches: Sequence[int]) -> None:
        """Measure squared norms of parts of the gradients from now on (see `parts_of`).

        `microbatches`: those that run on this rank.
        """
        tied = set(self.tied)
        own = [p for name, p in self.named_parameters().items() if name not in tied]
        if parts == MICROBATCHES:
            self.squares = MicrobatchSquaredNorms(own)
        else:
            self.squares = CopySquaredNorms(own, min(microbatches, default=0))

    def extra_states(self) -> dict[str, nn.Module]:
        """Return the modules that define `get_extra_state`, by the global name of that state."""
        named: dict[str, nn.Module] = {}
        for index, layer in self.layers.items():
            for name, module in layer.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    named[global_name(index, f"{name}._extra_state".lstrip("."))] = module
        return named

    def run_by(self, compiled: Mapping[int, Callable[..., Any]]) -> None:
        """Run the layers by compiled calls, given by layer index, from now on."""
        self.is_compiled = True
        for index in self.layers:
            self._placed[index].call = compiled[index]

    def sum_over(self, peers: Group) -> SumOver:
        """Return the function by which BatchNorm layers sum over peers; it is never compiled."""

        def sum_over_peers(tensor: torch.Tensor) -> None:
            with self.random.let_go():
                peers.all_reduce(tensor)

        if not self.is_compiled:
            return sum_over_peers
        untraced: Any = torch.compiler.disable
        return cast(SumOver, untraced(sum_over_peers))

    def _cut_runners(self) -> tuple[tuple[LayerRunner, bool], ...]:
        if self.recomputed is None:
            return ((self.whole, True),)
        runs = groupby(self.layers, key=self.recomputed.__contains__)
        return tuple((self._runner(list(indices)), again) for again, indices in runs)

    def _runner(self, indices: Iterable[int]) -> LayerRunner:
        placed = [self._placed[index] for index in indices]
        return LayerRunner(self.index, placed, self.random, self.device)

    def refuse_other_parameters(self) -> None:
        """Raise ModelError for a parameter that was added or replaced since the stage was built.

        New modules without parameters are accepted, and searched for buffers and generators.
        """
        if self.parameters.refuse_others():
            homes = {index: buffer_dicts_of(layer) for index, layer in self.layers.items()}
            for index, placed in self._placed.items():
                placed.renew(_sharing(index, homes))

    def refuse_changes(self) -> None:
        """End a step; raise ModelError if forwards wrote other values into copies of a parameter.

        Raises ConfigError if a parameter left the flat memory that ``outer.shard=flat`` updates.
        """
        self.parameters.end(trains=True)
        shards = self.gradients.shards
        if shards is not None and self.parameters.has_other_memory:
            shards.check_memory()

    def _place_layers(self, names: Mapping[int, SkipNames]) -> dict[int, Layer]:
        homes = {index: buffer_dicts_of(layer) for index, layer in self.layers.items()}
        return {
            index: Layer(
                index,
                layer,
                f"layers.{index} ({type(layer).__name__})",
                self.random,
                self.lasting,
                names=names.get(index),
                sharing=_sharing(index, homes),
                elsewhere=self._elsewhere.get(index),
            )
            for index, layer in self.layers.items()
        }


def _sharing(index: int, homes: Mapping[int, Sequence[tuple[str, Home]]]) -> list[tuple[str, Home]]:
    """Return the buffer dicts of other layers that contain a buffer of this layer."""
    own = {id(home) for _, home in homes[index]}
    held = {
        id(tensor) for _, home in homes[index] for tensor in home.values() if tensor is not None
    }
    return [
        (f"(layers.{other}) {prefix}", home)
        for other, named in homes.items()
        for prefix, home in named
        if id(home) not in own and any(id(tensor) in held for tensor in home.values())
    ]


@contextmanager
def evaluation_mode(stages: Iterable[Stage]) -> Iterator[None]:
    """Set all layers to evaluation within the block; restore each module's mode afterwards."""
    modules = [m for stage in stages for layer in stage.layers.values() for m in layer.modules()]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.training = was


class StageLoss:
    """Computes the loss terms of a stage's micro-batches, and checks the reduction of the loss.

    The loss runs as the layer after the last one of the model. It may draw random numbers and have
    buffers, so it has a random key and copies of buffers as a layer has.

    Args:
        stage: The stage; only the last one has losses.
        intake: Copies targets to the device.
    """

    def __init__(self, stage: Stage, intake: Intake) -> None:
        self._stage, self._intake = stage, intake
        self.function: LossFunction | None = None
        self._layer: Layer | None = None
        self._reduction: TorchLoss | None = None  # if the function is one of torch's own losses
        self._lasting = PersistentBuffers()
        self._num_begun = 0
        self._constants: list[AsyncHostTensor] = []  # losses without a graph, in the step before

    def begin(self) -> None:
        """Begin a step or an evaluation; ModelError if the last step had a loss without a graph."""
        self._num_begun += 1
        if self._stage.loss_watch is not None:
            self._stage.loss_watch.begin()
        constants, self._constants = self._constants, []
        for loss in constants:
            refuse_constant(float(loss.read()))
        if self.function is not None:
            self._reduction = torch_loss(self.function)

    def end(self) -> None:
        """End a step or an evaluation, also one that failed; write back buffers of the loss."""
        self._lasting.settle()

    def of(self, run: Run, microbatch: int, num_samples: int) -> Loss | None:
        """Return the loss of a micro-batch for `LayerRunner.run`; None if the run has no loss."""
        if run.loss_fn is None:
            return None
        if self._layer is None or self.function is not run.loss_fn:
            self.function, self._reduction = run.loss_fn, torch_loss(run.loss_fn)
            module = run.loss_fn if isinstance(run.loss_fn, nn.Module) else nn.Module()
            where = f"loss_fn ({getattr(run.loss_fn, '__name__', type(run.loss_fn).__name__)})"
            self._layer = Layer(run.num_layers, module, where, self._stage.random, self._lasting)
        return self._layer, partial(self._term, run, microbatch, num_samples)

    def _term(self, run: Run, microbatch: int, num_samples: int, output: Nest) -> LossTerm:
        """Return the loss term of one micro-batch."""
        assert run.loss_fn is not None and self._layer is not None, "known from the layer"
        where = self._layer.where
        target = self._target(run, microbatch, num_samples)
        watch: Reductions | None = None
        if self._num_begun <= NUM_LOOKED and self._reduction is None:
            watch = self._watch(where)
        try:
            term = loss_term(run.loss_fn, output, target, num_samples, self._reduction, watch)
            if watch is not None and self._stage.loss_watch is not None:
                self._stage.loss_watch.note(watch, term, num_samples, is_cut=run.is_cut)
            # A forward without a graph will be recomputed, and is checked then.
            lost = not term.total.requires_grad and torch.is_grad_enabled()
            if lost and has_graph(output):
                self._check_constant(term.total)
        except Exception as error:
            if not isinstance(error, GpipeError):  # ours name the loss in their text
                error.add_note(where)
            raise
        if self._stage.device.is_accelerator:
            both = term.total, term.weight
            refuse_astray(both, self._stage.device, where, ASTRAY, ModelError)
        return term

    def _target(self, run: Run, microbatch: int, num_samples: int) -> Nest:
        """Return the target of a micro-batch; raise DataError if it is of another size."""
        if run.targets is None:
            return None
        nests, sizes = run.targets
        if sizes[microbatch] != num_samples:
            known = f" ({sum(run.inputs[1])} inputs against {sum(sizes)})" if run.inputs else ""
            raise DataError(
                f"targets: expected {num_samples} samples in micro-batch {microbatch}, as in its "
                f"inputs, got {sizes[microbatch]}{known}; pass as many targets as inputs, from the "
                f"same slice of the batch on every rank (a list of tensors is read as several "
                f"targets for all samples: stack them, or pass [gpipe_hpc.whole(x) for ...])"
            )
        return self._intake.to_device(nests[microbatch])

    def _watch(self, where: str) -> Reductions | None:
        """Return a recorder of reductions within a user's loss; None if layers are compiled."""
        if self._stage.is_compiled:
            return None
        if self._stage.loss_watch is None:
            self._stage.loss_watch = LossWatch(self._stage.device, where)
        return Reductions()

    def _check_constant(self, loss: torch.Tensor) -> None:
        """Raise ModelError for a loss other than 0 that has no graph.

        A loss on an accelerator is read when the next step begins, as the host would wait for it
        now.
        """
        if self._stage.device.is_accelerator and self._stage.device.holds(loss):
            self._constants.append(AsyncHostTensor.of(loss, self._stage.device))
        else:
            refuse_constant(float(loss))
