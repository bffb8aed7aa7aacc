"""Make torch's Python API treat tensors as device tensors while a device is simulated.

Operators are intercepted at dispatch, but torch does not know that a CPU tensor simulates a device
tensor: `tensor.device`, moves, factories, and `on_host` of the device module are replaced here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch import Tensor

from gpipe_hpc.device.device import on_host
from tests.simulated.engine import SimulatedEngine
from tests.simulated.operators import Local, Move
from tests.simulated.storages import Kind, storage_of

if TYPE_CHECKING:
    from tests.simulated.device import SimulatedDevice

PLAYED: Final = torch.device("cpu", 0)
OTHER: Final = torch.device("cpu", 1)
"""A device that no rank has; what lies there can be made, and moved."""
_HOST: Final = torch.device("cpu")
_FACTORIES: Final = [
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "frombuffer",
    "from_numpy",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
]
_LIKE: Final = [
    "empty_like",
    "full_like",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
]
_NEW: Final = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"]

own_device = torch._C.TensorBase.device.__get__


class Simulation(threading.local):
    """The device that a thread simulates, or None."""

    device: SimulatedDevice | None = None


playing: Final = Simulation()
local: Final = Local()


def kind_of(tensor: Tensor) -> Kind:
    storage = storage_of(tensor)
    memory = None if storage is None else storage.__dict__.get("played")
    if memory is None and tensor.layout is torch.sparse_coo:
        return kind_of(torch.Tensor._values(tensor))
    return Kind.HOST if memory is None else memory.kind


def _device(self: Tensor) -> torch.device:
    own = own_device(self)
    if own.type != "cpu":
        return own
    return _PLACES.get(kind_of(self), own)


_PLACES: Final = {Kind.DEVICE: PLAYED, Kind.ELSEWHERE: OTHER}


def _on_host(tensor: Tensor) -> bool:
    return own_device(tensor).type == "cpu" and kind_of(tensor) not in _PLACES


def _kind(device: torch.device) -> Kind:
    kinds = {None: Kind.HOST, PLAYED.index: Kind.DEVICE, OTHER.index: Kind.ELSEWHERE}
    return kinds[device.index]


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    original = torch._C.TensorBase.to
    if playing.device is None or self.is_meta:
        return original(self, *args, **kwargs)
    given, rest = dict(kwargs), list(args)
    device, dtype = given.pop("device", None), given.pop("dtype", None)
    if rest and isinstance(rest[0], Tensor):
        device, dtype = rest[0].device, rest[0].dtype
        rest = rest[1:]
    elif rest and isinstance(rest[0], torch.dtype):
        dtype, rest = rest[0], rest[1:]
    elif rest:
        device, rest = rest[0], rest[1:]
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype, rest = rest[0], rest[1:]
    late = rest.pop(0) if rest else given.pop("non_blocking", False)
    copies = rest.pop(0) if rest else given.pop("copy", False)
    if "other" in given:
        other = given.pop("other")
        device, dtype = other.device, other.dtype
    dtype = self.dtype if dtype is None else dtype
    target = None if device is None else torch.device(device)
    if target is not None and target.type != "cpu":
        return original(self, target, dtype, late, copies, **given)
    of = kind_of(self)
    at = of if of in _PLACES else Kind.HOST
    is_move = target is not None and _kind(target) is not at
    if not is_move:
        return original(self, dtype, late, copies, **given)
    assert target is not None
    to = _kind(target)
    if to is Kind.HOST and late:
        to = Kind.PINNED  # as torch makes it for a copy that nobody waits for
    local.move = Move(to, late)
    try:
        return original(self, dtype, late, True, **given)
    finally:
        local.move = None


def _type_as(self: Tensor, other: Tensor) -> Tensor:
    return self.to(other.device, other.dtype)


def _new_tensor(self: Tensor, data: Any, **kwargs: Any) -> Tensor:
    """Create a tensor from Python numbers on the host, then move it to the device of `self`."""
    original = torch._C.TensorBase.new_tensor
    if playing.device is None or self.is_meta:
        return original(self, data, **kwargs)
    named = {"dtype": self.dtype, "device": self.device}
    given = {**named, **{name: value for name, value in kwargs.items() if value is not None}}
    return torch.tensor(data, **given)


def _cpu(self: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    return self.to(_HOST, memory_format=memory_format)


def _read(name: str) -> Callable[..., Any]:
    original = getattr(torch._C.TensorBase, name)

    @wraps(original)
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        player = playing.device
        if player is not None and not self.is_meta:
            if kind_of(self) is Kind.DEVICE:
                if name == "numpy" and not kwargs.get("force"):
                    player.tracker.misplaced(
                        "numpy", "expected a tensor of the host, got one of the device"
                    )
                player.reads(name, self)
            else:
                player.host_uses(name, self, is_write=False)
        return original(self, *args, **kwargs)

    return read


def _set_item(self: Tensor, index: Any, value: Any) -> None:
    original = torch._C.TensorBase.__setitem__
    before = local.factory, local.is_number
    if not isinstance(value, Tensor):
        local.factory, local.is_number = None, True  # it comes as an argument of the kernel
    try:
        original(self, index, value)
    finally:
        local.factory, local.is_number = before


def _factory(original: Callable[..., Any], *, follows: bool) -> Callable[..., Any]:
    """Make a factory create host tensors unless a device is given.

    `follows`: without a device argument, use the device of a tensor argument.
    """

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if playing.device is None:
            return original(*args, **kwargs)
        named = kwargs.get("device")
        target = None if named is None else torch.device(named)
        before = local.factory
        is_host = target.index is None if target is not None else not follows
        if target is not None and target.type != "cpu":
            is_host = False
        if original in _AS_TENSOR and args and isinstance(args[0], Tensor):
            copies = bool(kwargs.get("copy"))
            return args[0].to(target or args[0].device, kwargs.get("dtype"), copy=copies)
        if original in _FROM_DATA and target == PLAYED:
            # Made on the host and brought, as torch does it: the host waits.
            grad = kwargs.pop("requires_grad", False)
            host = make(*args, **{**kwargs, "device": None})
            return host.to(target).requires_grad_(grad)
        local.factory = Kind.HOST if is_host else None
        try:
            return original(*args, **kwargs)
        finally:
            local.factory = before

    return make


_AS_TENSOR: Final = (torch.as_tensor, torch.asarray)
_FROM_DATA: Final = (*_AS_TENSOR, torch.tensor)


def _inheriting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Make a thread simulate the device of its parent thread; torch's modes are per thread."""

    @wraps(start)
    def start_thread(self: threading.Thread) -> None:
        device = playing.device
        if device is not None:
            run = self.run

            def played() -> None:
                with device.playing():
                    run()

            self.__dict__["run"] = played
        start(self)

    return start_thread


def _grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch's grouping of tensors by device; the tensors share one device."""

    @wraps(original)
    def group(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        found = original(*args, **kwargs)
        return {
            (next(t for t in lists[0] if t is not None).device, dtype): (lists, places)
            for (_, dtype), (lists, places) in found.items()
        }

    return group


@contextmanager
def interposed() -> Iterator[None]:
    """Context that applies all replacements for all threads that simulate a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "device", property(_device), raising=False)
        patch.setattr(torch.Tensor, "to", _to, raising=False)
        patch.setattr(torch.Tensor, "cpu", _cpu, raising=False)
        patch.setattr(torch.Tensor, "type_as", _type_as, raising=False)
        patch.setattr(torch.Tensor, "new_tensor", _new_tensor, raising=False)
        patch.setattr(torch.Tensor, "__setitem__", _set_item, raising=False)
        for name in ("tolist", "numpy"):
            patch.setattr(torch.Tensor, name, _read(name), raising=False)
        for name in _FACTORIES:
            patch.setattr(torch, name, _factory(getattr(torch, name), follows=False))
        for name in _LIKE:
            patch.setattr(torch, name, _factory(getattr(torch, name), follows=True))
        for name in _NEW:
            original = getattr(torch._C.TensorBase, name)
            patch.setattr(torch.Tensor, name, _factory(original, follows=True), raising=False)
        name = "_group_tensors_by_device_and_dtype"
        patch.setattr(torch._C, name, _grouping(getattr(torch._C, name)))
        patch.setattr(threading.Thread, "start", _inheriting(threading.Thread.start))
        engine = SimulatedEngine(torch.autograd.Variable._execution_engine, lambda: playing.device)
        patch.setattr(torch.autograd.Variable, "_execution_engine", engine)
        for module in [m for m in sys.modules.values() if vars(m).get("on_host") is on_host]:
            patch.setattr(module, "on_host", _on_host)
        yield
