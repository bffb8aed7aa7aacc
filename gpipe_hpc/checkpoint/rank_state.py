"""The complete state of one rank at a step, serialized into bytes for in-memory checkpoints.

It can only be restored into the same layout. The bytes are a header (its length, then JSON that
lists the tensors), the tensors, and a digest of all preceding bytes: the SHA-256 of the SHA-256 of
each block. Nothing in them is executed.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from gpipe_hpc.checkpoint.contents import layout_facts, split_values
from gpipe_hpc.checkpoint.folder import OUTER, model_tensors
from gpipe_hpc.checkpoint.host_copy import HostBuffer, aligned_offsets, fill, views
from gpipe_hpc.checkpoint.manifest import TYPED
from gpipe_hpc.checkpoint.states import PREFIX, Split, decode, encode, join
from gpipe_hpc.small_files import parse_json

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

DIGEST_BYTES: Final = 32
LENGTH_BYTES: Final = 8
_BLOCK_BYTES: Final = 16 * 2**20
_NUM_THREADS: Final = 4
_MOST_VALUES: Final = 16_000_000
PARTS: Final = "parts"
"""Key of the ranges of partial parameters; absent if there are none."""
_MODEL: Final = "model."
_OPTIMIZER: Final = "optimizer."
_DTYPES: Final = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class StateError(ValueError):
    """Raised for bytes that are not a valid state, or that have changed since they were written."""


class StoredState(NamedTuple):
    """A state read from bytes: the writer's description of it, and its tensors by name."""

    about: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def pack(
    pipe: "Pipeline",
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    buffer: HostBuffer,
) -> torch.Tensor:
    """Serialize this rank's state into `buffer`; `about` must contain JSON values.

    Returns after the copy is complete, so the next step may start.
    """
    tensors, values, states = _live(pipe, optimizer)
    offsets, total = aligned_offsets(tensors)
    entries = [
        [name, str(tensor.dtype), list(tensor.shape), offset, tensor.device.type]
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
    ]
    header = {
        "about": {**about, **_position(pipe)},
        "values": values.plain,
        TYPED: values.typed,
        "states": states,
        "tensors": entries,
        "size": total,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % 64)
    start = LENGTH_BYTES + len(text)
    memory = buffer.reserve(start + total + DIGEST_BYTES)
    raw = memory.numpy()
    raw[:LENGTH_BYTES] = list(len(text).to_bytes(LENGTH_BYTES, "little"))
    raw[LENGTH_BYTES:start] = memoryview(text)
    fill(views(memory[start:], tensors, offsets), tensors, pipe.world.device)
    raw[-DIGEST_BYTES:] = list(_digest(raw[:-DIGEST_BYTES].data))
    return memory


def read_about(header: bytes) -> dict[str, Any]:
    """Return the writer's description in a header; raise StateError if it is invalid."""
    try:
        told = parse_json(header, _MOST_VALUES)
        about: dict[str, Any] = told["about"]
        if not isinstance(about, dict):
            raise TypeError("about is not an object")
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"invalid header: {error}") from error
    return about


def unpack(memory: torch.Tensor) -> StoredState:
    """Deserialize a state; raise StateError if it is damaged. Tensors are views of `memory`."""
    raw = memory.numpy()
    digest = _digest(raw[:-DIGEST_BYTES].data)
    if len(raw) < LENGTH_BYTES + DIGEST_BYTES or raw[-DIGEST_BYTES:].tobytes() != digest:
        raise StateError("the bytes have changed since they were written")
    length = int.from_bytes(raw[:LENGTH_BYTES].tobytes(), "little")
    text = raw[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
    about, header = read_about(text), parse_json(text, _MOST_VALUES)
    places = {
        name: torch.empty(shape, dtype=_DTYPES[dtype], device="meta")
        for name, dtype, shape, _, _ in header["tensors"]
    }
    offsets = [offset for _, _, _, offset, _ in header["tensors"]]
    tensors = views(memory[LENGTH_BYTES + length :], places, offsets)
    about["values"] = join(header["values"], header[TYPED])
    about["states"] = header["states"]
    about["devices"] = {name: device for name, _, _, _, device in header["tensors"]}
    return StoredState(about, tensors)


def fits(pipe: "Pipeline", state: StoredState) -> bool:
    """Return whether a state has the tensors, dtypes and shapes of this rank.

    The element ranges of partial parameters must be equal too, as another version may divide
    parameters differently.
    """
    if state.about.get(PARTS, {}) != _parts(pipe):
        return False
    targets = model_tensors(pipe)
    stored = {name: tensor for name, tensor in state.tensors.items() if name.startswith(_MODEL)}
    if stored.keys() != targets.keys():
        return False
    kinds = ((stored[name], target) for name, target in targets.items())
    parameters = pipe.owned_parameters().keys()
    owners = {_owner(name) for name in [*state.tensors, *state.about["values"]]}
    if not owners - {None} <= parameters or state.about["states"].keys() != _modules(pipe).keys():
        return False
    return all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in kinds)


def restore(pipe: "Pipeline", optimizer: torch.optim.Optimizer, state: StoredState) -> None:
    """Restore parameters, buffers, optimizer state and position from a state that `fits`."""
    about, tensors = state
    targets = model_tensors(pipe)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    parameters = {name: held.parameter for name, held in pipe.owned_parameters().items()}
    optimizer.state.clear()
    for full, value in {**tensors, **about["values"]}.items():
        name, _, key = full.removeprefix(_OPTIMIZER).rpartition(".")
        if not full.startswith(_OPTIMIZER):
            continue
        parameter = parameters[name]
        if isinstance(value, torch.Tensor):
            device = "cpu" if about["devices"][full] == "cpu" else parameter.device
            value = value.to(device, copy=True)
        optimizer.state[parameter][key] = value
    devices = about["devices"]
    own = {
        name: tensor.to("cpu" if devices[name] == "cpu" else pipe.world.device.torch, copy=True)
        for name, tensor in tensors.items()
        if name.startswith(PREFIX)
    }
    for name, module in _modules(pipe).items():
        module.set_extra_state(decode(about["states"][name], own))
    outer = {
        name.removeprefix(OUTER): tensor.to(pipe.world.device.torch, copy=True)
        for name, tensor in tensors.items()
        if name.startswith(OUTER)
    }
    pipe.restore_outer(outer)
    pipe.restore_position(about["steps_done"], about["loss_weight"], about["loss_scale"])


def _live(
    pipe: "Pipeline", optimizer: torch.optim.Optimizer
) -> tuple[dict[str, torch.Tensor], Split, dict[str, Any]]:
    """Return this rank's tensors, non-tensor optimizer values and extra states of modules."""
    tensors: dict[str, torch.Tensor] = dict(model_tensors(pipe))
    values: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, held in pipe.owned_parameters().items():
        for key, value in optimizer.state.get(held.parameter, {}).items():
            into = tensors if isinstance(value, torch.Tensor) else values
            into[f"{_OPTIMIZER}{name}.{key}"] = value
    tensors |= {OUTER + name: tensor for name, tensor in pipe.outer_state().items()}
    for name, module in _modules(pipe).items():
        states[name], own = encode(name, module.get_extra_state())
        tensors |= own
    return tensors, split_values(values), states


def _modules(pipe: "Pipeline") -> dict[str, nn.Module]:
    """Return this rank's modules with an extra state (`get_extra_state`), by their global names."""
    return {n: m for stage in pipe.stages.values() for n, m in stage.extra_states().items()}


def _digest(raw: memoryview) -> bytes:
    """Return the digest of bytes; their blocks are hashed in threads."""
    blocks = [raw[start : start + _BLOCK_BYTES] for start in range(0, len(raw), _BLOCK_BYTES)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        parts = pool.map(lambda block: hashlib.sha256(block).digest(), blocks)
        return hashlib.sha256(b"".join(parts)).digest()


def _owner(name: str) -> str | None:
    """Return the parameter name within a name of optimizer state; None for other tensors."""
    of_model = not name.startswith(_OPTIMIZER)
    return None if of_model else name.removeprefix(_OPTIMIZER).rpartition(".")[0]


def _parts(pipe: "Pipeline") -> dict[str, list[int]]:
    """Return the element range of each partial parameter that this rank updates."""
    held = pipe.owned_parameters().items()
    return {name: [each.start, each.stop] for name, each in held if each.is_view}


def _position(pipe: "Pipeline") -> dict[str, Any]:
    parts = _parts(pipe)
    return {
        **({PARTS: parts} if parts else {}),
        "steps_done": pipe.steps_done,
        "loss_weight": pipe.loss_weight,
        "loss_scale": None if pipe.loss_scale is None else pipe.loss_scale.state(),
        "partition": pipe.partition._asdict(),
        "parameters": {info.name: info.num_elements for info in pipe.all_parameters},
        **layout_facts(pipe),
    }
