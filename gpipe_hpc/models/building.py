"""Build one layer so that its weights depend on the seed and its index, never on the cut."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import Layer, LayerSpec, call_factory
from gpipe_hpc.models.randomness import GENERATOR_LOCK, init_key


def build_layer(
    layer: Layer, *, index: int, seed: int, device: torch.device | str = "cpu"
) -> nn.Module:
    """Return the module of one layer on ``device``.

    A `LayerSpec` is built on the CPU, whatever the device, under torch's generators seeded with
    `init_key(seed, index)`, then moved: the same weights on every kind of device. Only torch's
    random numbers are keyed; a factory that draws others must take a seed as argument. A module
    that comes built keeps its weights and is moved in place. The caller's random state is left
    as it was. On the device ``meta`` nothing is allocated.

    Raises `ModelError`, naming layer and factory, when the layer cannot be built or moved.
    """
    target = torch.device(device)
    where = f"layers.{index}"
    if isinstance(layer, LayerSpec):
        with seeded_generators(init_key(seed, index)), _building_device(target):
            module = call_factory(layer, where)
    else:
        module = layer
    refuse_lazy(module, where)
    return _moved(module, target, where)


@contextmanager
def seeded_generators(key: int) -> Iterator[None]:
    """Seed torch's default generators with ``key`` and restore them on leaving.

    Covers the CPU and, where CUDA is in use, the current CUDA device. Threads wait for one
    another, since the CPU generator belongs to the process.
    """
    with GENERATOR_LOCK:
        generators = [torch.default_generator]
        if torch.cuda.default_generators:  # empty until CUDA is in use
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(key)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _building_device(target: torch.device) -> torch.device:
    # A device is a context manager: it also shields the factory from a caller's default device.
    return target if target.type == "meta" else torch.device("cpu")


def refuse_lazy(module: nn.Module, where: str) -> None:
    """Raise ModelError if a parameter or buffer of the module has no shape yet."""
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(parameter, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ModelError(
                f"{where}: {name} has no shape yet, expected a layer of known size, got a lazy "
                f"{type(module).__name__}; give the layer its input size"
            )


def _moved(module: nn.Module, target: torch.device, where: str) -> nn.Module:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta and target.type != "meta":
            raise ModelError(
                f"{where}: {name} has no values, expected a layer with weights, got one on the "
                f"meta device; give a LayerSpec, or build {type(module).__name__} on the CPU"
            )
    return module.to(target)
