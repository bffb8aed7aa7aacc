"""One stage: its layers, run with keyed randomness, and never writing into what it was given."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from gpipe_hpc.comm.nests import Nest, flatten, tensors_of, unflatten
from gpipe_hpc.engine.gradients import StageGradients
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import GENERATOR_LOCK, Tie, global_name, named_layer_parameters

LayerKey = Callable[[int], int]
"""Gives the random key of a layer (by its global index) for the micro-batch at hand."""


class Stage:
    """Contiguous layers placed together.

    `layers` maps the global index of each layer to its module, ascending. `precision`: that of
    its forwards, see `casting`.
    """

    def __init__(
        self,
        index: int,
        layers: Mapping[int, nn.Module],
        device: torch.device,
        ties: Sequence[Tie] = (),
        precision: str = "float32",
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
        self.gradients = StageGradients(own)
        self._generators = generators_of(device)
        # By training mode (dropout writes in place in one only): whether the layers were seen
        # to leave the stage's input alone.
        self._leaves_input_alone: dict[bool, bool] = {}

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

    def owns(self, name: str) -> bool:
        """Say whether a parameter of the stage has its first place here, or the only one."""
        return name not in self.tied or name in self._aliases

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that belong into a checkpoint, by global name."""
        named: dict[str, torch.Tensor] = {}
        for index, layer in self.layers.items():
            kept = layer.state_dict().keys()
            for name, buffer in layer.named_buffers():
                if name in kept:
                    named[global_name(index, name)] = buffer
        return named

    @property
    def is_trained(self) -> bool:
        """Say whether any parameter of the stage requires a gradient."""
        return any(p.requires_grad for layer in self.layers.values() for p in layer.parameters())

    @property
    def _mode(self) -> bool:
        return any(layer.training for layer in self.layers.values())

    def run(self, boundary: Nest, key: LayerKey) -> Nest:
        """Run the layers on a boundary, each under its own random key.

        The boundary stays as it is: it may be needed for recomputation, and its storage may
        belong to the user or to another rank.
        """
        nest, copies = self._protect(boundary)
        watched = [] if copies else tensors_of(boundary)
        versions = [tensor._version for tensor in watched]
        for index, layer in self.layers.items():
            with self.keyed(key(index)):
                nest = layer(nest)
        if copies:
            self._leaves_input_alone[self._mode] = all(copy._version == 0 for copy in copies)
        elif versions != [tensor._version for tensor in watched]:
            raise ModelError(
                f"stage {self.index} (layers {min(self.layers)} to {max(self.layers)}): a layer "
                f"wrote in place into the stage's input in this micro-batch, but not in the "
                f"first; use inplace=False there, or write in place always"
            )
        return nest

    @contextmanager
    def keyed(self, seed: int) -> Iterator[None]:
        """Draw from generators seeded with `seed` within the block, and nobody else with us.

        Afterwards they are as they were: the user's own, whom they also serve, sees no change.
        """
        with GENERATOR_LOCK:
            # 1 us. Not once a step: ranks that are threads would save one another's seeds.
            states = [generator.get_state() for generator in self._generators]
            for generator in self._generators:
                generator.manual_seed(seed)
            try:
                yield
            finally:
                for generator, state in zip(self._generators, states, strict=True):
                    generator.set_state(state)

    def _protect(self, boundary: Nest) -> tuple[Nest, list[torch.Tensor]]:
        """Copy the boundary's tensors where layers write into them; the first run finds out.

        Its containers are made anew always: a layer may put other values into a dict or list.
        """
        leaves, tree = flatten(boundary)
        if self._leaves_input_alone.get(self._mode):
            return unflatten(leaves, tree), []
        copied = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        copies = [leaf for leaf in copied if isinstance(leaf, torch.Tensor)]
        return unflatten(copied, tree), copies


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators that `torch.manual_seed` seeds and a layer on `device` may draw from.

    Seeding them directly takes 2 us instead of 65.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return generators


@contextmanager
def training_modes(stages: Iterable[Stage], mode: bool) -> Iterator[None]:
    """Put all layers into one mode within the block; afterwards each module is as it was.

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
