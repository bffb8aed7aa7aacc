"""What modules keep by `get_extra_state`: plain values and tensors, without any pickle.

A value becomes JSON for the manifest, and its tensors are stored beside the others.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from gpipe_hpc.comm.device import on_host
from gpipe_hpc.errors import CheckpointError

PREFIX: Final = "state."  # ahead of the global names, for tensors within extra states


def encode(name: str, value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return an extra state as JSON can hold it, and its tensors by their names in a checkpoint.

    `name`: the state's global name. Raises CheckpointError for what is neither None, bool, int,
    float, str, list, tuple, dict (keys: str, int, float, bool or None) nor a tensor.
    """
    tensors: dict[str, Tensor] = {}

    def written(part: Any, where: str) -> Any:
        match part:
            case Tensor():
                key = f"{PREFIX}{name}.{len(tensors)}"
                tensors[key] = part.detach()
                return {"tensor": key, "on_cpu": on_host(part)}
            case None | bool() | int() | float() | str() if type(part) in _SCALARS:
                return part
            case list() if type(part) is list:
                return [written(each, f"{where}[{i}]") for i, each in enumerate(part)]
            case tuple() if type(part) is tuple:
                return {"tuple": [written(each, f"{where}[{i}]") for i, each in enumerate(part)]}
            case dict() if type(part) is dict and all(type(key) in _SCALARS for key in part):
                return {"dict": [[k, written(v, f"{where}[{k!r}]")] for k, v in part.items()]}
        raise CheckpointError(
            f"checkpoint: {name}: expected get_extra_state of {name.rpartition('.')[0]} to return "
            f"tensors and plain values (None, bool, int, float, str, list, tuple, dict), got "
            f"{type(part).__module__}.{type(part).__qualname__} at {where}; turn it into those, "
            f"and back in set_extra_state"
        )

    return written(value, "value"), tensors


def tensor_names(written: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names of an encoded state's tensors, each with whether it was on the CPU."""
    match written:
        case {"tensor": str(key), "on_cpu": bool(on_cpu)}:
            yield key, on_cpu
        case {"tuple": list(parts)} | list(parts):
            for part in parts:
                yield from tensor_names(part)
        case {"dict": list(items)}:
            for _, part in items:
                yield from tensor_names(part)


def decode(written: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `encode` was given, with these tensors."""
    match written:
        case {"tensor": str(key)}:
            return tensors[key]
        case {"tuple": list(parts)}:
            return tuple(decode(part, tensors) for part in parts)
        case {"dict": list(items)}:
            return {key: decode(part, tensors) for key, part in items}
        case list(parts):
            return [decode(part, tensors) for part in parts]
    return written


_SCALARS: Final = (type(None), bool, int, float, str)
