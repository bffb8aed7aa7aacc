"""Load a checkpoint: each rank reads its own tensors, whatever the layout was at saving.

All ranks first check everything: every byte of every file, the model's names, shapes and dtypes,
the optimizer's options and the free memory. Only after all ranks have agreed are tensors
overwritten, in place; there is never a second copy of the model.
"""

import logging
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.checkpoint.agreement import all_or_none
from gpipe_hpc.checkpoint.folder import OUTER, error_text, model_tensors, other_checkpoint
from gpipe_hpc.checkpoint.metadata import StoredTensor
from gpipe_hpc.checkpoint.options import stored_options
from gpipe_hpc.checkpoint.replica_states import ReplicaSources, average
from gpipe_hpc.checkpoint.states import decode, tensor_names
from gpipe_hpc.checkpoint.verifying import Verified, verify
from gpipe_hpc.comm.collectives.group import ControlGroup, rank_names
from gpipe_hpc.data_parallel import OwnedParameter
from gpipe_hpc.device.device import Device, HostDevice
from gpipe_hpc.device.host.machine import shared_identity
from gpipe_hpc.errors import CheckpointError, HalfLoadedError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

log = logging.getLogger("gpipe_hpc.checkpoint")

_PART_BYTES: Final = 2**30


class _TensorSlice(NamedTuple):
    """Part of a stored tensor that a rank keeps, and the device for it."""

    held: OwnedParameter
    device: torch.device


class _LoadingPlan(NamedTuple):
    """The loading plan of one rank.

    Args:
        targets: tensors to overwrite, by their names in the checkpoint.
        wanted: devices of tensors to create, by name.
        cuts: tensors of which this rank keeps a part, by name.
        states: names of the optimizer's state entries, by parameter and key.
        options: options of the optimizer's parameter groups.
        extra_states: modules with their stored extra state.
        outer: names of the tensors of the outer optimizer (local SGD).
        reading: the replica whose state this rank reads.
        model: the entries of `targets` that belong to the model.
    """

    targets: dict[str, Tensor]
    wanted: dict[str, torch.device]
    cuts: dict[str, _TensorSlice]
    states: dict[nn.Parameter, dict[str, str]]
    options: list[dict[str, Any]]
    extra_states: list[tuple[nn.Module, Any]]
    outer: list[str]
    reading: ReplicaSources
    model: dict[str, Tensor]


def load(
    pipe: "Pipeline", checkpoint: Path | Verified, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Load parameters, buffers and optimizer state into a pipeline; return the `extra` values.

    The layout may differ from that at saving. Parameter groups get the options that their
    parameters had, except those that select an implementation (foreach, fused, capturable,
    differentiable).

    Raises:
        CheckpointError: on all ranks and without changing anything, if there is no intact
            checkpoint at the path, if it is of another model or type of optimizer, if the
            parameters of one group had different options, or if there is too little memory.
        HalfLoadedError: if a verified file can no longer be read.
    """
    world_group = pipe.world_group
    found = checkpoint
    if isinstance(found, Path):
        found = verify(found, world_group, pipe.world.rank, partial(_note, pipe))
    plan = all_or_none(world_group, lambda: _plan(pipe, found, optimizer))
    _check_memory(found.path, world_group, pipe.world.device, _needed_bytes(plan, found.stored))
    made = all_or_none(world_group, lambda: _make(plan, found))
    targets = plan.targets | made
    all_or_none(world_group, lambda: _check_readable(found, [*targets, *plan.cuts]))
    # From here on the state of this rank changes.
    try:
        for number, part in enumerate(_parts(targets), start=1):
            _note(pipe, f"reading {found.path}: part {number}")
            found.fill(part)
        targets |= {name: _cut_out(found, name, cut) for name, cut in plan.cuts.items()}
    except (OSError, ValueError) as error:
        raise HalfLoadedError(
            f"checkpoint {found.path}: reading a verified file failed: "
            f"{error_text(error)}; the model is now partly loaded: end this process, check the "
            f"disk, and start again"
        ) from error
    with torch.no_grad():
        average(plan.model, targets, plan.reading)
    values = found.facts["values"] | targets
    if optimizer is not None:
        _set_optimizer(optimizer, plan, values)
    for module, state in plan.extra_states:
        module.set_extra_state(decode(state, targets))
    pipe.restore_outer({name.removeprefix(OUTER): targets[name] for name in plan.outer})
    facts = found.facts
    pipe.restore_position(facts["steps_done"], facts["loss_weight"], facts.get("loss_scale"))
    extra: dict[str, Any] = facts["extra"]
    return extra


def _parts(targets: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in groups of about 1 GiB, so that a rank can report its progress."""
    part: dict[str, Tensor] = {}
    room = _PART_BYTES
    for name, tensor in targets.items():
        part[name] = tensor
        room -= tensor.nbytes
        if room <= 0:
            yield part
            part, room = {}, _PART_BYTES
    yield part


def _note(pipe: "Pipeline", activity: str) -> None:
    pipe.world.activity = activity


def _plan(
    pipe: "Pipeline", found: Verified, optimizer: torch.optim.Optimizer | None
) -> _LoadingPlan:
    """Run all checks and return the loading plan; nothing is changed."""
    path, facts, stored = found.path, found.facts, found.stored
    _check_model(pipe, path, facts)
    reading = ReplicaSources.of(pipe, facts)
    model = {reading.of_model(name): tensor for name, tensor in model_tensors(pipe).items()}
    for name, tensor in model.items():
        _check_fits(path, name, tensor, stored.get(name))
    _warn_unknown(pipe, found, model)
    targets = dict(model)
    states: dict[nn.Parameter, dict[str, str]] = {}
    options: list[dict[str, Any]] = []
    wanted = {other: tensor.device for n, tensor in model.items() for other in reading.others(n)}
    cuts: dict[str, _TensorSlice] = {}
    if optimizer is not None:
        held = pipe.owned_parameters()
        named = [(name, each.parameter) for name, each in held.items()]
        options = stored_options(named, optimizer, facts.get("optimizer") or [], path)
        states = _stored_states(named, [*stored, *facts["values"]], reading)
        _check_described(path, facts, states, named)
        _warn_no_optimizer(pipe, found)
        kept, made, cuts = _places(optimizer, states, stored, list(held.values()))
        targets |= kept
        wanted |= made
    extra_states = _extra_states(pipe, found)
    for _, state in extra_states:
        _check_decodes(path, state)
        for name, on_cpu in tensor_names(state):
            wanted[name] = torch.device("cpu") if on_cpu else pipe.world.device.torch
    outer: list[str] = []
    if optimizer is not None:
        names = {name.removeprefix(OUTER) for name in stored if name.startswith(OUTER)}
        outer = [OUTER + name for name in pipe.outer_wanted(names)]
        wanted |= dict.fromkeys(outer, pipe.world.device.torch)
    lacking = next((name for name in wanted if name not in stored), None)
    if lacking is not None:
        raise _lacks(path, lacking)
    return _LoadingPlan(targets, wanted, cuts, states, options, extra_states, outer, reading, model)


def _check_model(pipe: "Pipeline", path: Path, facts: Mapping[str, Any]) -> None:
    ours = {info.name: info.num_elements for info in pipe.all_parameters}
    theirs = facts["parameters"]
    if ours == theirs:
        return
    differing = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    name = differing[0]
    raise CheckpointError(
        f"checkpoint {path} is of another model: {len(differing)} "
        f"parameters differ, for example {name} with {theirs.get(name, 'no')} elements, while this "
        f"model has {ours.get(name, 'none')}; resume with the model configuration of that run"
    )


def _check_fits(path: Path, name: str, tensor: Tensor, stored: StoredTensor | None) -> None:
    if stored is None:
        raise _lacks(path, name)
    widens = torch.promote_types(stored.dtype, tensor.dtype) == tensor.dtype
    alike = _kind(stored.dtype) == _kind(tensor.dtype)
    if stored.shape == tensor.shape and widens and alike:
        return
    raise CheckpointError(
        f"checkpoint {path} is of another model: {name.partition('.')[2]} has shape "
        f"{list(stored.shape)} and {stored.dtype} in the checkpoint, but {list(tensor.shape)} and "
        f"{tensor.dtype} in this model, which cannot represent it without loss; resume with the "
        f"model configuration of that run"
    )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _lacks(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is of another model: it does not contain "
        f"{name.partition('.')[2]}; resume with the model configuration of that run"
    )


def _check_decodes(path: Path, state: object) -> None:
    """Raise CheckpointError if an extra state cannot be decoded, before anything is changed."""
    no_tensor = torch.empty(0)
    try:
        decode(state, {name: no_tensor for name, _ in tensor_names(state)})
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {path}: an extra state of a module cannot be decoded: "
            f"{error}; {other_checkpoint(path)}"
        ) from error


def _check_described(
    path: Path,
    facts: Mapping[str, Any],
    states: Mapping[nn.Parameter, Mapping[str, str]],
    named: Sequence[tuple[str, nn.Parameter]],
) -> None:
    """Raise CheckpointError if optimizer state is stored without options of its parameter group."""
    if facts["format"] == 1 or facts.get("optimizer") is None:  # written by an earlier version
        return
    described = {name for entry in facts["optimizer"] for name in entry["parameters"]}
    for name, parameter in named:
        if parameter in states and name not in described:
            raise CheckpointError(
                f"checkpoint {path}: contains optimizer state of {name} but not the options of "
                f"its group; {other_checkpoint(path)}"
            )


def _warn_no_optimizer(pipe: "Pipeline", found: Verified) -> None:
    """Warn if the checkpoint contains no optimizer state, so that the optimizer has none."""
    # In-memory checkpoints and the first versions have no list of groups.
    is_listed = found.facts.get("optimizer", True) or not found.facts["parameters"]
    is_there = any(name.startswith("optimizer.") for name in found.stored)
    if is_listed or is_there or pipe.world.rank != pipe.world_group.ranks[0]:
        return
    log.warning(
        "checkpoint %s was saved without an optimizer, so this optimizer starts with "
        "no state (moments, step counts) and its own options; save it too with pipe.save(path, "
        "optimizer), or load only the weights with pipe.load(path)",
        found.path,
    )


def _warn_unknown(pipe: "Pipeline", found: Verified, targets: Mapping[str, Tensor]) -> None:
    """Warn about tensors of this rank's layers in the checkpoint that the model does not have."""
    prefixes = tuple(
        f"model.layers.{index}." for stage in pipe.stages.values() for index in stage.layers
    )
    for name in sorted(found.stored.keys() - targets.keys()):
        if name.startswith(prefixes) and not pipe.replica:
            log.warning(
                "checkpoint %s contains %s, which this model does not have: it is not loaded",
                found.path,
                name.partition(".")[2],
            )


def _stored_states(
    named: list[tuple[str, nn.Parameter]], names: list[str], reading: ReplicaSources
) -> dict[nn.Parameter, dict[str, str]]:
    """Return the names of the optimizer's stored state entries, by parameter and key."""
    by_prefix: dict[str, dict[str, str]] = {}
    for full in names:
        prefix, _, key = full.rpartition(".")
        by_prefix.setdefault(prefix, {})[key] = full
    prefix_of = {name: reading.of_optimizer(f"optimizer.{name}") for name, _ in named}
    found = {parameter: by_prefix.get(prefix_of[name], {}) for name, parameter in named}
    return {parameter: keys for parameter, keys in found.items() if keys}


def _places(
    optimizer: torch.optim.Optimizer,
    states: Mapping[nn.Parameter, Mapping[str, str]],
    stored: Mapping[str, StoredTensor],
    held: Sequence[OwnedParameter],
) -> tuple[dict[str, Tensor], dict[str, torch.device], dict[str, _TensorSlice]]:
    """Sort optimizer state into tensors to overwrite, tensors to create, and tensors to slice.

    The last are those of which this rank keeps a part, or stores the elements flattened.
    """
    of = {each.parameter: each for each in held}
    cuts: dict[str, _TensorSlice] = {}
    counts_on_device = {
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("capturable") or group.get("fused")
    }
    kept: dict[str, Tensor] = {}
    wanted: dict[str, torch.device] = {}
    for parameter, keys in states.items():
        for key, full in keys.items():
            if full not in stored:
                continue
            # As in torch's load_state_dict: the step counter is on the CPU unless kernels read it,
            # all other state is on the parameter's device.
            is_beside = key != "step" or parameter in counts_on_device
            device = parameter.device if is_beside else torch.device("cpu")
            own = optimizer.state.get(parameter, {}).get(key)
            is_like_whole = key != "step" and stored[full].shape == of[parameter].whole.shape
            if of[parameter].is_view and is_like_whole:
                cuts[full] = _TensorSlice(of[parameter], device)
            elif isinstance(own, Tensor) and _is_like(own, stored[full], device):
                kept[full] = own.detach()
            else:
                wanted[full] = device
    return kept, wanted, cuts


def _is_like(tensor: Tensor, stored: StoredTensor, device: torch.device) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (stored.shape, stored.dtype, device)


def _extra_states(pipe: "Pipeline", found: Verified) -> list[tuple[nn.Module, Any]]:
    """Return this rank's modules that define `get_extra_state`, each with its stored state."""
    modules = {n: m for s in pipe.stages.values() for n, m in s.extra_states().items()}
    if found.facts["format"] == 1:
        for name in modules:
            log.warning(
                "checkpoint %s was written by an earlier version and has no %s: the layer keeps "
                "its current one",
                found.path,
                name,
            )
        return []
    states = found.facts["states"]
    for name in modules:
        if name not in states:
            raise _lacks(found.path, f"state.{name}")
    return [(module, states[name]) for name, module in modules.items()]


def _needed_bytes(
    plan: _LoadingPlan, stored: Mapping[str, StoredTensor]
) -> dict[torch.device, int]:
    """Return the additional bytes needed for loading, by device: new tensors and a read buffer."""
    needed: dict[torch.device, int] = {}
    for name, device in plan.wanted.items():
        size = stored[name].dtype.itemsize * stored[name].shape.numel()
        needed[device] = needed.get(device, 0) + size
    for name, (held, device) in plan.cuts.items():
        size = stored[name].dtype.itemsize * held.parameter.numel()
        needed[device] = needed.get(device, 0) + size
    cpu = torch.device("cpu")
    names = [*plan.targets, *plan.wanted, *plan.cuts]
    # A tensor to cut is on the host twice: as stored and as read.
    largest = max((stored[name].length * (1 + (name in plan.cuts)) for name in names), default=0)
    return needed | {cpu: needed.get(cpu, 0) + largest}


def _check_memory(
    path: Path, group: ControlGroup, device: Device, needed: Mapping[torch.device, int]
) -> None:
    """Raise CheckpointError on all ranks if a host or device lacks free memory. Collective.

    `needed` is the number of bytes that this rank needs on the host and on `device`; the needs of
    ranks that share a host or device are added up.
    """
    host = shared_identity("mnt") or socket.gethostname()
    own = {
        f"{host} {where}": (size, (device if where == device.torch else HostDevice()).memory_free())
        for where, size in needed.items()
    }
    first = group.ranks[0]
    told = group.gather_object(own, first)
    lacking = group.broadcast_object(told and _memory_shortage(group.ranks, told), first)
    if lacking:
        raise CheckpointError(f"checkpoint {path}: {lacking}")


def _memory_shortage(
    ranks: Sequence[int], told: Sequence[Mapping[str, tuple[int, int | None]]]
) -> str | None:
    """Return the message for the first host or device with too little memory, or None.

    `told` contains, for each rank, the needed and free bytes by host or device.
    """
    sharing: dict[str, list[tuple[int, int, int | None]]] = {}
    for rank, own in zip(ranks, told, strict=True):
        for place, (need, free) in own.items():
            sharing.setdefault(place, []).append((rank, need, free))
    for _, there in sorted(sharing.items()):
        size = sum(need for _, need, _ in there)
        free = min((free for *_, free in there if free is not None), default=None)
        if free is not None and size > free:
            return (
                f"loading needs {size / 1e6:,.3f} MB of memory on "
                f"{rank_names([rank for rank, *_ in there])} (the optimizer's state and the "
                f"largest tensor), but {free / 1e6:,.3f} MB are free; stop other processes, use "
                f"more machines, or load only the weights: pipe.load without an optimizer"
            )
    return None


def _make(plan: _LoadingPlan, found: Verified) -> dict[str, Tensor]:
    try:
        return {
            name: torch.empty(found.stored[name].shape, dtype=found.stored[name].dtype, device=d)
            for name, d in plan.wanted.items()
        }
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint {found.path}: not enough memory for the optimizer's state: "
            f"{error_text(error)}; use more machines, or load only the weights: pipe.load without "
            f"an optimizer"
        ) from error


def _cut_out(found: Verified, name: str, cut: _TensorSlice) -> Tensor:
    """Read a tensor and return the elements that this rank owns."""
    stored = found.stored[name]
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    found.fill({name: whole})
    return cut.held.part_of(whole).to(cut.device, copy=True)


def _check_readable(found: Verified, names: Iterable[str]) -> None:
    """Raise CheckpointError if a tensor is unreadable at its listed location, before any change."""
    for name in names:
        try:
            found.check(name)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {found.path}: {name} cannot be read from "
                f"{found.stored[name].file}: {error_text(error)}; {other_checkpoint(found.path)}"
            ) from error


def _set_optimizer(
    optimizer: torch.optim.Optimizer, plan: _LoadingPlan, values: Mapping[str, Any]
) -> None:
    optimizer.state.clear()
    for parameter, keys in plan.states.items():
        optimizer.state[parameter] = {key: values[full] for key, full in keys.items()}
    for group, stored in zip(optimizer.param_groups, plan.options, strict=True):
        group.update(stored)
