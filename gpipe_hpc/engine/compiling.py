"""Compilation of the layers of a rank by torch.compile, one at a time.

Layers of one kind share what is compiled; other kinds do not take from their limit of variants.
Parameters, their names and the layers themselves stay as they are.
"""

import importlib.util
import inspect
import os
import shutil
import types
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError

Call = Callable[..., Any]

_INDUCTOR: Final = "inductor"
# With and without gradients, trained and evaluated, sizes fixed, free and 1.
_MAX_VARIANTS: Final = 64


def chosen_backend(wish: bool | str, device: Device) -> str | None:
    """Return the backend that the setting `compile` selects; None for no compilation.

    Raises ConfigError for one that torch does not know, or whose compiler is missing.
    """
    if wish is False:
        return None
    backend = _INDUCTOR if wish is True else wish
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join([*torch.compiler.list_backends(), "aot_eager", "eager"])
        raise ConfigError(
            f"compile: unknown backend, expected true, false or one of {known}, got {wish!r}; "
            f"choose one of them"
        )
    if backend == _INDUCTOR:
        _require_compiler(device)
    return backend


def compile_layers(layers: Mapping[int, nn.Module], backend: str) -> dict[int, Call]:
    """Return a compiled call for each layer; compilation happens in the first call.

    `layers`: of all stages of the rank, so that their layers share what is compiled, too. Random
    numbers are those of uncompiled layers, so a mask is the same in F and R.
    """
    kinds: dict[Hashable, Call] = {}
    calls: dict[int, Call] = {}
    for index, layer in layers.items():
        kind = _kind(layer)
        if kind not in kinds:
            kinds[kind] = _compiled(f"layers_{index}", backend)
        calls[index] = partial(kinds[kind], layer)
    return calls


def _kind(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers that are likely to compile to the same code."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (
        type(layer),
        repr(layer),
        tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors),
    )


def _compiled(name: str, backend: str) -> Call:
    # torch counts variants by code object: each kind of layer has one of its own.
    code = _call.__code__.replace(co_name=name)
    function = types.FunctionType(code, _call.__globals__, name)
    options: dict[str, Any] = {}
    if backend == _INDUCTOR:
        options["options"] = {"fallback_random": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _MAX_VARIANTS
    compiled: Call = torch.compile(function, backend=backend, **options)
    return compiled


def _call(layer: nn.Module, *args: Any) -> Any:
    return layer(*args)


def _require_compiler(device: Device) -> None:
    if device.is_accelerator:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "compile: expected Triton, which makes GPU code, got none; pip install triton, or "
                "compile=false"
            )
        return
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(shutil.which(name.split()[0]) for name in wanted):
        raise ConfigError(
            f"compile: expected a C++ compiler, got none of {', '.join(wanted)}; install g++, set "
            f"CXX, or compile=false"
        )
