"""Options of an optimizer's parameter groups in a checkpoint, stored by parameter.

Parameter groups of a rank contain the parameters of its stages, so another partition has other
groups. The checkpoint therefore lists each distinct set of options once with the parameters that
had it; on loading, a group gets the options of its parameters.
"""

import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from gpipe_hpc.errors import CheckpointError

# Not stored: lists of this rank's parameters, and the choice of implementation.
_OWN: Final = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_NEEDED: Final = {"lr", "betas", "eps", "weight_decay", "momentum"}  # never None
_AMSGRAD: Final = {"amsgrad": "max_exp_avg_sq"}
_STATE_OF: Final = {"Adam": _AMSGRAD, "AdamW": _AMSGRAD, "RMSprop": {"centered": "grad_avg"}}
# Options that need state from the first step on.
_NEED_STATE: Final = ("amsgrad", "centered", "momentum")

Entry = dict[str, Any]
"""Options of parameters as JSON: kind (optimizer class), options, state (keys), parameters."""


def describe_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> list[Entry]:
    """Return an `Entry` for each parameter group that contains parameters of this rank."""
    names = {parameter: name for name, parameter in named_parameters}
    entries = []
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if parameter in names]
        keys = {key for parameter in own for key in optimizer.state.get(parameter, {})}
        entry = {
            "kind": type(optimizer).__name__,
            "options": _options(group),
            "state": sorted(keys),
            "parameters": [names[parameter] for parameter in own],
        }
        entries += [entry] if own else []
    return entries


def merge_groups(parts: Iterable[Iterable[Entry]]) -> list[Entry]:
    """Merge the entries of all ranks into one for each type of optimizer and set of options."""
    merged: dict[str, Entry] = {}
    for entry in (each for part in parts for each in part):
        key = json.dumps([entry["kind"], entry["options"]], sort_keys=True)
        first = merged.setdefault(key, entry | {"state": [], "parameters": []})
        for what in ("state", "parameters"):
            first[what] = sorted({*first[what], *entry[what]})
    return list(merged.values())


def stored_options(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    entries: Sequence[Entry],
    path: Path,
) -> list[dict[str, Any]]:
    """Return, for each parameter group, the options that its parameters had at saving.

    A group whose parameters are not in the checkpoint gets none; a group without parameters gets
    the options that all entries share. Raises CheckpointError if the checkpoint is of another type
    of optimizer, or if the parameters of one group had different options.
    """
    by_name = {name: entry for entry in entries for name in entry["parameters"]}
    of = {parameter: (n, by_name[n]) for n, parameter in named_parameters if n in by_name}
    found = []
    for group in optimizer.param_groups:
        known = [of[parameter] for parameter in group["params"] if parameter in of]
        _check_kind(optimizer, [e for _, e in known] or entries, path)
        is_empty = not any(parameter.numel() for parameter in group["params"])
        options = _shared_options(entries) if is_empty else _common_options(known, path)
        for _, entry in known:
            _check_state(group, entry, path)
        found.append({k: _checked(k, v, group, path) for k, v in options.items()})
    return found


def _checked(key: str, written: Any, group: Mapping[str, Any], path: Path) -> Any:
    """Decode an option; raise CheckpointError if its type differs from that of the group's value.

    A group without this option, or with the value None, accepts any value.
    """
    own = group.get(key)
    try:
        value = _restored(written, own)
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _unfit(path, key, "a valid encoded option", error) from error
    kind, expected = _kind(value), _kind(own)
    if key in group and own is not None and kind != expected:
        is_truth = value in (0, 1) and own in (0, 1)
        if not is_truth and (value is not None or key in _NEEDED):
            raise _unfit(path, key, f"{expected}, as in this optimizer", f"{value!r:.80}")
    return value


def _unfit(path: Path, key: str, expected: str, got: object) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: expected the optimizer's option {key} to be {expected}, got {got}; "
        f"load another checkpoint, or only the weights: pipe.load without an optimizer"
    )


def _kind(value: Any) -> str:
    """Return a type name of an option's value; values with equal names may replace each other."""
    match value:
        case bool():
            return "true or false"
        case int() if value.bit_length() > 1000:  # no float
            return f"a number of {value.bit_length()} bits"
        case torch.Tensor() | numbers.Real():
            return "a number"
        case str():
            return "a string"
        case tuple() | list():
            return f"({', '.join(map(_kind, value))})"
    return f"of type {type(value).__name__}"


def _check_kind(optimizer: torch.optim.Optimizer, entries: Sequence[Entry], path: Path) -> None:
    ours, theirs = type(optimizer).__name__, sorted({entry["kind"] for entry in entries})
    if theirs and ours not in theirs:
        keys = sorted({key for entry in entries for key in entry["state"]})
        raise CheckpointError(
            f"checkpoint {path} was saved with the optimizer {', '.join(theirs)} (its state: "
            f"{', '.join(keys) or 'none'}), but this run uses {ours}; use {theirs[0]} (on the "
            f"command line optimizer={theirs[0].lower()}), or load only the weights: pipe.load "
            f"without an optimizer"
        )


def _check_state(group: Mapping[str, Any], entry: Entry, path: Path) -> None:
    options = entry["options"]
    for key in _NEED_STATE if entry["state"] else ():
        if group.get(key) and not options.get(key, True):
            raise CheckpointError(
                f"checkpoint {path} was saved by {entry['kind']} with {key}={options[key]}, so the "
                f"state that {key}={group[key]} needs is missing; use "
                f"{key}={options[key]}, or load only the weights: pipe.load without an optimizer"
            )

    needed = _STATE_OF.get(entry["kind"], {})
    for key, state in needed.items() if entry["state"] else ():
        if options.get(key) and state not in entry["state"]:
            raise _unfit(path, key, f"off because its state has no {state}", options[key])


def _common_options(known: Sequence[tuple[str, Entry]], path: Path) -> dict[str, Any]:
    """Return the common options of a group's parameters; raise CheckpointError if they differ."""
    if not known:
        return {}
    first, options = known[0][0], known[0][1]["options"]
    for name, entry in known[1:]:
        other = entry["options"]
        for key in sorted(options.keys() | other.keys()) if other != options else ():
            if options.get(key) != other.get(key):
                raise CheckpointError(
                    f"checkpoint {path}: parameters of one group had different options: "
                    f"{key}={options.get(key)} for {first} and {key}={other.get(key)} for {name}; "
                    f"create the groups as in the saving run, or load without the optimizer"
                )
    return dict(options)


def _shared_options(entries: Sequence[Entry]) -> dict[str, Any]:
    first = entries[0]["options"] if entries else {}
    others = [entry["options"] for entry in entries[1:]]
    return {k: v for k, v in first.items() if all(k in o and o[k] == v for o in others)}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if key in _OWN:
            continue
        try:
            options[key] = _written(value)
        except TypeError:
            continue  # for example a function, which the new optimizer defines itself
    return options


def _written(value: Any) -> Any:
    """Encode an option as JSON; raise TypeError if it cannot be encoded."""
    match value:
        case None | bool() | str():
            return value
        case torch.Tensor():
            return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case tuple():
            return {"tuple": [_written(each) for each in value]}
        case list():
            return [_written(each) for each in value]
    raise TypeError(type(value).__name__)


def _restored(written: Any, own: Any) -> Any:
    """Decode an option into a tensor or a number, like the group's current value `own`."""
    match written:
        case {"tuple": parts}:
            owns = own if isinstance(own, (tuple, list)) else ()
            owns = owns if len(owns) == len(parts) else [None] * len(parts)
            return tuple(_restored(part, each) for part, each in zip(parts, owns, strict=True))
        case {"tensor": content, "dtype": dtype}:
            value = torch.tensor(content, dtype=getattr(torch, dtype))
            if isinstance(own, numbers.Real) and value.numel() == 1:
                return value.item()
            return value if not isinstance(own, torch.Tensor) else value.to(own)
        case list():
            return [_restored(part, None) for part in written]
        case bool() | None | str():
            return written
    return torch.full_like(own, written) if isinstance(own, torch.Tensor) else written
