"""One stage: its layers, with their parameters and buffers by global name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.data_parallel import GradientBuckets, OwnedParameter
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.batchnorm_statistics import StageStatistics
from gpipe_hpc.engine.buffers import Home, PersistentBuffers, buffer_dicts_of
from gpipe_hpc.engine.compiling import Call
from gpipe_hpc.engine.gradient_norms import SquaredNorms, squares_of
from gpipe_hpc.engine.layer_runner import Layer, LayerRunner
from gpipe_hpc.engine.loss import LossWatch
from gpipe_hpc.engine.parameters import StageParameters
from gpipe_hpc.engine.random_state import RandomState
from gpipe_hpc.engine.stages.routes import StageRoutes
from gpipe_hpc.models import (
    Conversion,
    PipelineStep,
    PooledBatchNorm,
    SkipNames,
    SumOver,
    Tie,
    convert_batchnorm,
    global_name,
    named_layer_parameters,
)


class Stage:
    """Contiguous layers placed together.

    `layers` maps the global index of each layer to its module, ascending. `precision`: that of
    its forwards, see `casting`. `names`: what each layer stashes and pops. `recomputed`: the
    layers whose graph an ``R`` makes, where the table has one; None for all. `elsewhere`: which
    buffers of each layer a layer of another stage has too.
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
        self.gradients = GradientBuckets(own, device, self._layers_of_parameters())
        self.parameters = StageParameters(self.layers, named, device)
        self.squares: SquaredNorms | None = None
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
        # The layers in stretches, each with whether an R makes its graph: without recomputation,
        # and with it. One stretch if nothing is recomputed, or everything is.
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

    def _layers_of_parameters(self) -> dict[str, int]:
        return {
            name: index
            for index, layer in self.layers.items()
            for name, _ in named_layer_parameters(index, layer)
        }

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
        """Measure the parts of gradients from now on; `microbatches`: those that run here."""
        tied = set(self.tied)
        own = [p for name, p in self.named_parameters().items() if name not in tied]
        self.squares = squares_of(parts, own, microbatches)

    def extra_states(self) -> dict[str, nn.Module]:
        """Return the modules with a `get_extra_state` of their own, by the state's global name."""
        named: dict[str, nn.Module] = {}
        for index, layer in self.layers.items():
            for name, module in layer.named_modules():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    named[global_name(index, f"{name}._extra_state".lstrip("."))] = module
        return named

    def run_by(self, compiled: Mapping[int, Call]) -> None:
        """Run the layers by compiled calls, given by layer index, from now on."""
        self.is_compiled = True
        for index in self.layers:
            self._placed[index].call = compiled[index]

    def sum_over(self, peers: Group) -> SumOver:
        """Return how BatchNorm layers sum over peers; a compiler must not trace a collective."""

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
        """Raise ModelError for a parameter that was added or replaced since the stage was made.

        Other modules are taken in: they may have buffers, and draw random numbers.
        """
        if self.parameters.refuse_others():
            homes = {index: buffer_dicts_of(layer) for index, layer in self.layers.items()}
            for index, placed in self._placed.items():
                placed.renew(_sharing(index, homes))

    def refuse_changes(self) -> None:
        """End a step; raise ModelError or ConfigError if its forwards wrote what they must not.

        With ``outer.shard=flat`` an update reaches only the memory that is divided.
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
    """Return the buffer dicts of other layers that share a tensor with those of a layer."""
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
def training_modes(stages: Iterable[Stage], mode: bool) -> Iterator[None]:
    """Set the training mode of all layers within the block; restore each module's afterwards.

    A module the user had set to evaluation (a frozen BatchNorm) stays so for training.
    """
    modules = [m for stage in stages for layer in stage.layers.values() for m in layer.modules()]
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = mode
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.training = was
