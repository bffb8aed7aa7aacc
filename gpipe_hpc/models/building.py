"""Build a layer so that its weights depend on the seed and its index only, not on the partition."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from gpipe_hpc.device.device import Device, HostDevice, generators_in_use
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import Layer, LayerSpec, call_factory
from gpipe_hpc.models.randomness import (
    GENERATOR_LOCK,
    init_key,
    process_generators_kept,
    seed_numpy,
    seed_python,
)

_HOST: Final = torch.device("cpu")
_META: Final = torch.device("meta")


def build_layer(
    layer: Layer, *, index: int, seed: int, device: Device | None = None, on_device: bool = False
) -> nn.Module:
    """Build one layer on a device (default: the CPU).

    A `LayerSpec` is built on the CPU, under generators seeded with `init_key(seed, index)`, and
    then moved, so that weights are the same on every kind of device. With `on_device` it is built
    on the device itself: billions of weights take seconds instead of minutes, but depend on the
    kind of device. The default generators of torch, Python and NumPy are seeded, and restored
    afterwards; a factory must seed generators that it creates. A built module keeps its weights and
    is moved in place.

    Raises:
        ModelError: the layer cannot be built or moved; the message names layer and factory.
    """
    device = device or HostDevice()
    if on_device and device.is_accelerator:
        torch.empty(0, device=device.torch)  # initialise the device, which creates its generator
    module = _built(layer, index, seed, device.torch if on_device else _HOST)
    _refuse_abstract(module, f"layers.{index}")
    return device.place(module)


def build_abstract(layer: Layer, *, index: int) -> nn.Module:
    """Build one layer on torch's device ``meta``, which allocates no memory.

    Raises `ModelError` as `build_layer` does, also for a factory that reads tensor values.
    """
    return _built(layer, index, 0, _META).to(_META)


def _built(layer: Layer, index: int, seed: int, place: torch.device) -> nn.Module:
    where = f"layers.{index}"
    if isinstance(layer, LayerSpec):
        # As a context, the device also overrides a default device that the caller set.
        with seeded_generators(init_key(seed, index)), place:
            module = call_factory(layer, where)
    else:
        module = layer
    refuse_lazy(module, where)
    return module


@contextmanager
def seeded_generators(key: int) -> Iterator[None]:
    """Seed the default generators of torch, Python and NumPy; restore them on exit.

    For torch, these are the generators of the CPU and of the current accelerator, if one is in use.
    Threads run this block one at a time, because the generators belong to the process.
    """
    with GENERATOR_LOCK, process_generators_kept():
        generators = generators_in_use()
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(key)
            seed_python(key)
            seed_numpy(key)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def refuse_lazy(module: nn.Module, where: str) -> None:
    """Raise ModelError if a parameter or buffer of the module is uninitialised (lazy)."""
    for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(parameter, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ModelError(
                f"{where}: {name} has no shape yet, because {type(module).__name__} is a lazy "
                f"module; give the layer its input size"
            )


def _refuse_abstract(module: nn.Module, where: str) -> None:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ModelError(
                f"{where}: {name} is on the meta device and has no values; pass a LayerSpec, or "
                f"build {type(module).__name__} on the CPU"
            )
