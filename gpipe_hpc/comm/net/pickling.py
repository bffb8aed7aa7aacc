"""Serialization of objects that ranks exchange, without executing code from a message.

Python's pickle calls any function that a message names. Here a message may name only

- plain Python types: numbers, strings, bytes, dates, paths, and tuples, lists, dicts and sets;
- tensors, dtypes, devices and sizes of torch, NumPy arrays and scalars;
- records: enums, named tuples and dataclasses that only store their fields;
- containers registered with torch.utils._pytree, and classes registered with
  `register_boundary_type`.

Classes must already be imported: a message never causes an import. The sender applies the same
rules, so an unsupported value is refused where it was created, with the name of its type.
"""

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import sys
import uuid
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from gpipe_hpc.errors import ConfigError, DataError, ModelError
from gpipe_hpc.schedule import Op, Placement, Row, Schedule
from gpipe_hpc.torch_compat import pytree

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_MARK: Final = "__gpipe_hpc_travels__"

_PLAIN: Final[Mapping[tuple[str, str], type]] = MappingProxyType(
    {
        (kind.__module__, kind.__qualname__): kind
        for kind in (
            *(bool, int, float, complex, str, bytes, bytearray, range, slice),
            *(tuple, list, dict, set, frozenset),
            *(collections.OrderedDict, collections.defaultdict, collections.deque),
            collections.Counter,
            *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
            *(datetime.timezone, decimal.Decimal, fractions.Fraction, uuid.UUID),
            *(pathlib.PosixPath, pathlib.PurePosixPath),
            *(torch.Size, torch.device),
        )
    }
)
_PLAIN_KINDS: Final = frozenset(_PLAIN.values())
# Dataclasses of this package whose constructors only check their fields.
_OURS: Final = (Schedule, Placement)
_PLAIN_VALUES: Final = MappingProxyType({("builtins", "Ellipsis"): ...})
_TORCH_KINDS: Final = (torch.dtype, torch.layout, torch.memory_format)

# Methods that may run code when an object is created, modified or destroyed.
_SPECIAL_METHODS: Final = (
    *("__new__", "__init__", "__post_init__", "__del__", "__setattr__", "__getattribute__"),
    *("__getattr__", "__setstate__", "__reduce__", "__reduce_ex__"),
)
_BARE_BASES: Final = ("builtins", "typing", "abc", "enum")


def register_boundary_type(cls: type[T]) -> type[T]:
    """Allow objects of a class to be sent between ranks. Call on every rank, or use as decorator.

    A layer may then return them as values within its output. A tensor inside would lose its
    gradient and is refused; register containers of tensors with torch.utils._pytree. Named tuples,
    plain dataclasses and enums need no registration. A host that can send to a rank can create such
    an object with any content, so its ``__init__``, ``__setstate__`` and similar must be harmless.

    Raises ConfigError for a class implemented in C or not at the top level of its module.
    """
    if "<locals>" in cls.__qualname__:
        raise ConfigError(
            f"register_boundary_type: expected a class at the top level of its module, got "
            f"{_name(cls)}, which other ranks cannot find; move it there"
        )
    _mark(cls)
    return cls


def rebuilds(function: F) -> F:
    """Allow messages to call a function of this package that rebuilds a value from plain parts."""
    _mark(function)
    return function


def _mark(thing: Any) -> None:
    try:
        setattr(thing, _MARK, True)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"register_boundary_type: expected a class written in Python, got {_name(thing)} "
            f"({error}); return its parts from the layer instead"
        ) from None


def dumps(value: object, what: str, *, hides: str = "") -> bytes:
    """Serialize a value for other ranks; ``what`` names it in error messages.

    ``hides`` is the error message for a tensor inside the value; empty if tensors are allowed.

    Raises DataError, naming the type, for a value that other ranks would refuse, and ModelError for
    a tensor that is not allowed.
    """
    stream = io.BytesIO()
    _send(_Sender(stream, hides), value, what)
    return stream.getvalue()


def check_travels(value: object, what: str) -> None:
    """Check that `dumps` would accept an object, without copying tensors; raise the same errors.

    For objects that threads pass on directly.
    """
    _send(_Checker(io.BytesIO(), ""), value, what)


def _send(sender: "_Sender", value: object, what: str) -> None:
    try:
        sender.dump(value)
    except _Refused as refused:
        raise DataError(
            f"{what}: cannot send {refused}; only plain tensors and values (numbers, strings, "
            f"tuples, lists, dicts, named tuples, dataclasses) are allowed: send its parts, or "
            f"pass its class to gpipe_hpc.register_boundary_type on every rank"
        ) from None
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(
            f"{what}: a value of class {_name(type(value))} cannot be pickled: {error}; send its "
            f"parts"
        ) from error


def loads(data: bytes | memoryview, what: str) -> Any:
    """Deserialize bytes from another rank without executing code that they name.

    Raises DataError for anything that `dumps` does not produce.
    """
    try:
        return _Receiver(io.BytesIO(data)).load()
    except _Refused as refused:
        raise DataError(
            f"{what}: received {refused}, which this rank does not accept; call "
            f"gpipe_hpc.register_boundary_type for its class on every rank; if this job does not "
            f"use it, another program sends to this port"
        ) from None
    except Exception as error:  # a forged message may raise anything
        raise DataError(
            f"{what}: cannot decode a message from another rank ({type(error).__name__}: {error}); "
            "another program sends to this port, or the ranks run different versions"
        ) from error


class _Refused(Exception):
    """Raised for a value or name that no message may contain; its text is the type or name."""


class _Sender(pickle.Pickler):
    """Pickler that writes only what `_Receiver` accepts."""

    def __init__(self, stream: io.BytesIO, hides: str) -> None:
        super().__init__(stream, protocol=5)
        self._hides = hides

    def reducer_override(self, value: Any) -> Any:
        """Refuse a value, describe it by plain parts, or leave it to pickle.

        pickle does not call this for built-in plain values.
        """
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if self._hides:
                raise ModelError(self._hides)
            return self.describe_tensor(value)
        if kind is np.ndarray:
            return _describe_array(value)
        if isinstance(value, np.generic):
            return _array_item, _describe_array(np.asarray(value))[1]
        if kind is Row:
            return _describe_row(value)
        if isinstance(value, _TORCH_KINDS):
            return _RebuildCall(_of_torch, (str(value).removeprefix("torch."),))
        if isinstance(value, np.dtype):
            return _RebuildCall(_dtype, (_describe_dtype(value),))
        if isinstance(value, Enum) and _is_allowed(kind):
            # As most versions of Python do; 3.11.0 to 3.11.3 use getattr, which is not allowed.
            return kind, (value.value,)
        if isinstance(value, type):
            if not _is_allowed(value):
                raise _Refused(f"the class {_name(value)}")
        elif isinstance(value, FunctionType):
            if not _is_marked(value):
                raise _Refused(f"the function {_name(value)}")
        elif value is not ... and not _is_allowed(kind):
            raise _Refused(f"a value of class {_name(kind)}")
        return NotImplemented

    def describe_tensor(self, tensor: torch.Tensor) -> Any:
        """Return the call that rebuilds a tensor."""
        return _describe_tensor(tensor)


class _Checker(_Sender):
    """Pickler that checks a value without copying its tensors."""

    def describe_tensor(self, tensor: torch.Tensor) -> Any:
        """Check the tensor without reading its elements."""
        _check_plain_tensor(tensor)
        return _RebuildCall(_tensor, ())


class _Receiver(pickle.Unpickler):
    """Unpickler for plain values, records and registered classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a message names, if it is allowed."""
        plain = _PLAIN.get((module, name)) or _PLAIN_VALUES.get((module, name))
        if plain is not None:
            return plain
        found = _look_up(module, name)
        # The name must be defined in this module, not imported into it.
        if (getattr(found, "__module__", None), getattr(found, "__qualname__", None)) == (
            module,
            name,
        ) and (_is_allowed(found) if isinstance(found, type) else _is_marked(found)):
            return found
        raise _Refused(f"{module}.{name}")


def _look_up(module: str, name: str) -> Any:
    """Return the attribute with a dotted name in an imported module; None if it does not exist."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, type | ModuleType):
            return None
        found = vars(found).get(part)
    return found


def _is_allowed(kind: type) -> bool:
    return (
        kind in _PLAIN_KINDS
        or _is_marked(kind)
        or _is_record(kind)
        or kind in _OURS
        # Internal containers of torch do not occur in the outputs of models.
        or (kind in pytree.SUPPORTED_NODES and not kind.__module__.startswith("torch._"))
    )


def _is_marked(thing: object) -> bool:
    # In its own namespace: a subclass is not registered by its base class.
    return isinstance(thing, type | FunctionType) and _MARK in vars(thing)


@lru_cache(maxsize=1024)
def _is_record(kind: type) -> bool:
    """Return whether creating objects of a class runs no code written by its author."""
    if "<locals>" in kind.__qualname__:
        return False
    if issubclass(kind, Enum):
        return bool(kind.__members__)
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if not (named_tuple or "__dataclass_fields__" in vars(kind)):
        return False
    bases = [base for base in kind.__mro__ if base.__module__ not in _BARE_BASES]
    hooks = [vars(base)[name] for base in bases for name in _SPECIAL_METHODS if name in vars(base)]
    return all(map(_is_generated, hooks))


def _is_generated(hook: object) -> bool:
    """Return whether `dataclasses` or `collections` generated a method."""
    code = getattr(hook, "__code__", getattr(getattr(hook, "__func__", None), "__code__", None))
    made = code is not None and code.co_filename == "<string>"
    return made or getattr(hook, "__module__", "") == "dataclasses"


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


class _RebuildCall(NamedTuple):
    """A function call in a message, which rebuilds a value."""

    function: Callable[..., object]
    parts: tuple[object, ...]


def _check_plain_tensor(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _Refused(f"a tensor of class {_name(type(tensor))}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise _Refused("a tensor that is sparse, quantized or nested")


def _describe_tensor(tensor: torch.Tensor) -> _RebuildCall:
    _check_plain_tensor(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return _RebuildCall(_tensor, (tensor.dtype, tuple(tensor.shape), raw, tensor.requires_grad))


@rebuilds
def _of_torch(name: str) -> Any:
    """Return a torch dtype, layout or memory format by name."""
    found = vars(torch).get(name)
    if not isinstance(found, _TORCH_KINDS):
        raise _Refused(f"torch.{name}")
    return found


@rebuilds
def _tensor(
    dtype: torch.dtype, shape: tuple[int, ...], raw: bytes, requires_grad: bool
) -> torch.Tensor:
    """Rebuild a tensor in host memory."""
    if not raw:
        return torch.empty(shape, dtype=dtype).requires_grad_(requires_grad)
    return (
        torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape).requires_grad_(requires_grad)
    )


def _describe_row(row: Row) -> _RebuildCall:
    kinds = [(op.value, stage, peer) for op, stage, peer in row.kinds]
    return _RebuildCall(_row, (kinds, row.which.tobytes(), row.numbers.tobytes()))


@rebuilds
def _row(kinds: list[tuple[str, int, int | None]], which: bytes, numbers: bytes) -> Row:
    """Rebuild a row of a schedule table."""
    named = tuple((Op(op), stage, peer) for op, stage, peer in kinds)
    return Row.of_bytes(named, which, numbers)


def _describe_array(array: np.ndarray[Any, Any]) -> _RebuildCall:
    return _RebuildCall(_array, (_describe_dtype(array.dtype), array.shape, array.tobytes()))


def _describe_dtype(dtype: np.dtype[Any]) -> object:
    if dtype.hasobject:
        raise _Refused("a NumPy array of Python objects")
    return dtype.str if dtype.names is None else dtype.descr


@rebuilds
def _array(dtype: Any, shape: tuple[int, ...], raw: bytes) -> np.ndarray[Any, Any]:
    """Rebuild a NumPy array."""
    return np.frombuffer(bytearray(raw), dtype=_dtype(dtype)).reshape(shape)


@rebuilds
def _array_item(dtype: Any, shape: tuple[int, ...], raw: bytes) -> Any:
    """Rebuild a NumPy scalar."""
    return _array(dtype, shape, raw)[()]


@rebuilds
def _dtype(description: Any) -> np.dtype[Any]:
    """Rebuild a NumPy dtype."""
    dtype: np.dtype[Any] = np.dtype(description)
    if dtype.hasobject:  # its elements would be pointers
        raise _Refused("a NumPy array of Python objects")
    return dtype
