"""Exact JSON encoding of Python values: `extra`, extra states of modules, optimizer states.

Plain JSON turns numeric keys into strings and tuples into lists. Here each container or number that
JSON does not know is written as an object with one key, the name of its type. Types that are not
listed are refused; nothing that a file names is imported or called.
"""

import base64
import math
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor
from torch.torch_version import TorchVersion

from gpipe_hpc.device.device import on_host
from gpipe_hpc.errors import CheckpointError

PREFIX: Final = "state."  # prefix of the global names of tensors in extra states
_PLAIN: Final = (type(None), bool, int, float, str)
_SEQUENCES: Final[Mapping[str, type]] = {
    each.__name__: each for each in (tuple, set, frozenset, deque)
}
_MAPPINGS: Final[Mapping[str, type]] = {
    each.__name__: each for each in (dict, OrderedDict, Counter)
}
_BASES: Final = (int, float, str, dict, list, tuple)  # subclasses are written as these
_BYTES: Final[Mapping[str, type]] = {each.__name__: each for each in (bytes, bytearray)}
_NUMPY_KINDS: Final = "biufcmM"
_MOST_DEPTH: Final = 100  # each level of a dict has three levels in JSON
_MOST_BITS: Final = 4096  # maximum size of an integer: Python parses at most 4300 digits
_ALLOWED: Final = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, Counter, OrderedDict, "
    "deque, torch.__version__, NumPy scalars and arrays"
)


class _NotExact(Exception):
    """A part of a value that cannot be encoded exactly; the text contains its location."""


def encode(name: str, value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Encode a module's extra state as JSON values; return it with its tensors, by name.

    `name` is the state's global name. Raises CheckpointError if a value has an unsupported type.
    """
    tensors: dict[str, Tensor] = {}

    def keep(tensor: Tensor) -> Any:
        key = f"{PREFIX}{name}.{len(tensors)}"
        tensors[key] = tensor.detach()
        return {"tensor": key, "on_cpu": on_host(tensor)}

    try:
        return _written(value, "value", 0, keep), tensors
    except _NotExact as error:
        raise CheckpointError(
            f"checkpoint: {name}: get_extra_state of {name.rpartition('.')[0]} must return "
            f"tensors and plain values ({_ALLOWED}), got {error}; convert it, and convert it back "
            f"in set_extra_state"
        ) from error


class Split(NamedTuple):
    """Entries of a dict: `plain` ones, which JSON preserves exactly, and encoded pairs (`typed`).

    For an OrderedDict or a Counter, `typed` is the encoding of the whole object.
    """

    plain: dict[str, Any]
    typed: Any


def split(values: object, where: str, remedy: str) -> Split:
    """Encode the entries of a dict for JSON; `join` is the inverse.

    Warns about subclasses, such as defaultdict or an IntEnum, which are written as their base
    class.

    Args:
        values: the dict, OrderedDict or Counter.
        where: name of the values in messages.
        remedy: advice in the error message.

    Raises:
        CheckpointError: if a value has an unsupported type, or if `values` is not a mapping.
    """
    kind = type(values)
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"checkpoint: {where}: expected a dict, an OrderedDict or a Counter, got "
            f"{kind.__qualname__}: {values!r:.80}; pass a dict that contains the value, such as "
            f"{{'value': ...}}"
        )
    if kind is not _MAPPINGS.get(kind.__name__):
        _warn(kind, dict, where)
        values, kind = dict(values), dict
    plain: dict[str, Any] = {}
    typed: list[Any] = []
    try:
        if kind is not dict:
            return Split({}, _written(values, where, 0))
        for key, value in values.items():
            place = f"{where}[{key!r}]"
            entry = [_written(key, f"the key {place}", 0), _written(value, place, 0)]
            if type(key) is str and _has_json_types(value):
                plain[key] = value
            else:
                typed.append(entry)
    except _NotExact as error:
        raise CheckpointError(
            f"checkpoint: {where}: values must have a type that can be saved and loaded exactly "
            f"({_ALLOWED}), got {error}; {remedy}"
        ) from error
    return Split(plain, typed)


def join(plain: Mapping[str, Any], typed: object) -> dict[Any, Any]:
    """Decode the result of `split`; raise ValueError if it is malformed."""
    found = decode(typed if isinstance(typed, dict) else {"dict": typed}, {})
    if not isinstance(found, dict):
        raise ValueError(f"not a dict: {str(found)[:80]}")
    return {**plain, **found} if type(found) is dict else found


def tensor_names(written: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names of the tensors in an encoded state, each with whether it was on the CPU."""
    match written:
        case {"tensor": str(key), "on_cpu": bool(on_cpu)}:
            yield key, on_cpu
        case dict():
            for part in written.values():
                yield from tensor_names(part)
        case list():
            for part in written:
                yield from tensor_names(part)


def decode(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a value, given its tensors by name; raise ValueError if it is malformed."""
    try:
        return _read(written, tensors)
    except (TypeError, LookupError, OverflowError) as error:
        raise ValueError(f"a malformed value: {error}") from error


def _has_json_types(value: Any) -> bool:
    """Return whether JSON preserves a value with all its types."""
    if type(value) is dict:
        return all(type(k) is str and _has_json_types(v) for k, v in value.items())
    if type(value) is list:
        return all(map(_has_json_types, value))
    return type(value) in _PLAIN


def _written(part: Any, where: str, depth: int, keep: Callable[[Tensor], Any] | None = None) -> Any:
    """Encode a value as JSON; `keep` encodes a tensor. Raises _NotExact for unsupported types.

    If `keep` is given, subclasses are refused too, since the module that reads the value may depend
    on the class.
    """
    kind = type(part)
    if depth > _MOST_DEPTH:
        raise _NotExact(f"more than {_MOST_DEPTH} levels at {where[:200]}...")
    if isinstance(part, Tensor) and keep is not None:
        return keep(part)
    if kind in _PLAIN:
        if kind is int and part.bit_length() > _MOST_BITS:
            raise _NotExact(f"a number of {part.bit_length()} bits at {where}")
        return part

    def inner(each: Any, place: str) -> Any:
        return _written(each, where + place, depth + 1, keep)

    if kind is complex:
        return {"complex": [part.real, part.imag]}
    if kind is TorchVersion:
        return {"TorchVersion": str(part)}
    if kind.__name__ in _BYTES and kind is _BYTES[kind.__name__]:
        return {kind.__name__: base64.b64encode(part).decode()}
    if kind is list or kind is _SEQUENCES.get(kind.__name__):
        parts = [inner(each, f"[{i}]") for i, each in enumerate(part)]
        if kind is deque:
            return {"deque": parts, "maxlen": part.maxlen}
        return parts if kind is list else {kind.__name__: parts}
    if kind is _MAPPINGS.get(kind.__name__):
        items = [[inner(k, f", key {k!r}"), inner(v, f"[{k!r}]")] for k, v in part.items()]
        return {kind.__name__: items}
    if (kind is np.ndarray or isinstance(part, np.generic)) and part.dtype.kind in _NUMPY_KINDS:
        content = base64.b64encode(np.ascontiguousarray(part).tobytes()).decode()
        shape = list(part.shape) if kind is np.ndarray else None
        return {"numpy": content, "dtype": part.dtype.str, "shape": shape}
    base = next((each for each in _BASES if issubclass(kind, each)), None)
    if keep is not None or base is None:
        raise _NotExact(f"{kind.__module__}.{kind.__qualname__} at {where}")
    _warn(kind, base, where)
    # str() of a string enum may return its name instead of its value.
    plain = str.__str__(part) if base is str else base(part)
    return _written(plain, where, depth, keep)


def _warn(kind: type, base: type, where: str) -> None:
    warnings.warn(
        f"checkpoint: {where}: a {kind.__module__}.{kind.__qualname__} is saved as a plain "
        f"{base.__name__}, and loaded as one; convert it after loading if its class is needed",
        stacklevel=2,
    )


def _read(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    match written:
        case None | bool() | int() | float() | str():
            return written
        case list(parts):
            return [_read(part, tensors) for part in parts]
        case {"tensor": str(key), "on_cpu": bool()} if len(written) == 2:
            return tensors[key]
        case {"deque": list(parts), "maxlen": None | int() as most} if len(written) == 2:
            return deque([_read(part, tensors) for part in parts], most)
        case {"numpy": str(content), "dtype": str(dtype), "shape": shape} if len(written) == 3:
            return _array(content, dtype, shape)
        case {"complex": [float(real), float(imaginary)]}:
            return complex(real, imaginary)
        case {"TorchVersion": str(text)}:
            return TorchVersion(text)
    if isinstance(written, dict) and len(written) == 1:
        ((kind, parts),) = written.items()
        if kind in _BYTES and isinstance(parts, str):
            return _BYTES[kind](base64.b64decode(parts, validate=True))
        if kind in _SEQUENCES and isinstance(parts, list):
            return _SEQUENCES[kind](_read(part, tensors) for part in parts)
        if kind in _MAPPINGS and isinstance(parts, list):
            return _MAPPINGS[kind]({_read(k, tensors): _read(v, tensors) for k, v in parts})
    raise ValueError(f"a malformed value: {str(written)[:80]}")


def _array(content: str, dtype: str, shape: Any) -> Any:
    kind = np.dtype(dtype)
    sizes = [] if shape is None else shape
    if kind.kind not in _NUMPY_KINDS or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"an invalid array of dtype {dtype!r} and shape {shape!r}")
    raw = base64.b64decode(content, validate=True)
    if len(raw) != math.prod(sizes) * kind.itemsize:
        raise ValueError(f"an array of shape {shape!r} in {len(raw)} bytes")
    array = np.frombuffer(raw, kind).reshape(sizes)
    return array[()] if shape is None else array.copy()
