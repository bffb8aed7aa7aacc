"""Checkpoints that any layout can load: torch.distributed.checkpoint, keyed by global names.

A checkpoint is a folder. It is written aside and appears by one rename, so that a folder with
its final name is always whole.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gpipe_hpc.comm.failure import lost
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

FACTS = "gpipe_hpc.json"
PARTIAL_SUFFIX = ".partial"


def save(
    pipe: "Pipeline",
    path: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
) -> Path:
    """Write `path`; all ranks call it, tensors held by several replicas are stored once.

    Raises CheckpointError if `path` exists or cannot be written.
    """
    path = path.absolute()
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    is_first = pipe.world.rank == 0
    if is_first:
        if path.exists():
            raise CheckpointError(f"checkpoint {path}: expected a new name, got an existing one")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    pipe.everybody.all_gather_object("ready to write")
    tensors = _model_tensors(pipe)
    values: dict[str, Any] = {}
    if optimizer is not None:
        _split(optimizer_state(pipe, optimizer), tensors, values)
    _write(pipe, tensors, partial)
    gathered = pipe.everybody.all_gather_object(values)
    if is_first:
        merged = {name: value for part in gathered for name, value in part.items()}
        _write_facts(pipe, partial, merged, extra)
        os.rename(partial, path)
        _sync_folder(path.parent)
    pipe.everybody.all_gather_object("written")
    return path


def load(pipe: "Pipeline", path: Path, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Fill the pipeline's parameters and buffers, and the optimizer; return `extra`.

    The layout may be another one than at saving. Raises CheckpointError if there is no whole
    checkpoint at `path`, or it is of another model.
    """
    path = path.absolute()
    facts = read_facts(path)
    _check_model(pipe, path, facts)
    reader = FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    targets = _model_tensors(pipe)
    states: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        states = _allocate_states(pipe, stored, facts["values"])
        targets |= {
            f"optimizer.{name}.{key}": value
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
    with _alone(), _named(path, "read"):
        state_dict_loader.load(targets, storage_reader=reader, no_dist=True)
    if optimizer is not None:
        _set_optimizer(pipe, optimizer, states)
    pipe.restore_position(facts["steps_done"], facts["loss_weight"], facts.get("loss_scale"))
    extra: dict[str, Any] = facts["extra"]
    return extra


def read_facts(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself; CheckpointError if there is none at `path`."""
    try:
        facts: dict[str, Any] = json.loads((path / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: expected a folder written by gpipe_hpc, got "
            f"{'no such folder' if not path.exists() else error}; look under run.dir/checkpoints"
        ) from error
    return facts


def optimizer_state(pipe: "Pipeline", optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state of this rank's parameters as optimizer.<name>.<key>."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in pipe.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _model_tensors(pipe: "Pipeline") -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for stage in pipe.stages.values():
        for name, parameter in stage.named_parameters().items():
            tensors[f"model.{name}"] = parameter.detach()
        for name, buffer in stage.named_buffers().items():
            tensors[f"model.{name}"] = buffer
    return tensors


def _split(state: Mapping[str, Any], tensors: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in state.items():
        (tensors if isinstance(value, torch.Tensor) else values)[name] = value


def _write(pipe: "Pipeline", tensors: dict[str, Any], folder: Path) -> None:
    """Write this rank's tensors: all ranks into one checkpoint."""
    group = pipe.everybody.torch_group
    if group is not None:
        with _named(folder, "written"):
            writer = FileSystemWriter(folder)
            state_dict_saver.save(tensors, storage_writer=writer, process_group=group)
        return
    # Threads, or one rank: the first one writes for all.
    gathered = pipe.everybody.all_gather_object(tensors)
    if pipe.world.rank == 0:
        merged = {name: value for part in gathered for name, value in part.items()}
        with _alone(), _named(folder, "written"):
            state_dict_saver.save(merged, storage_writer=FileSystemWriter(folder), no_dist=True)
    pipe.everybody.all_gather_object("tensors are written")


def _write_facts(
    pipe: "Pipeline", folder: Path, values: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    facts = {
        "format": 1,
        "steps_done": pipe.steps_done,
        "loss_weight": pipe.loss_weight,
        "loss_scale": None if pipe.loss_scale is None else pipe.loss_scale.state(),
        "parameters": {info.name: info.num_elements for info in pipe.all_parameters},
        "num_layers": pipe.num_layers,
        "stages": pipe.mesh.stages,
        "replicas": pipe.mesh.replicas,
        "partition": pipe.partition._asdict(),
        "values": dict(values),
        "extra": dict(extra),
    }
    with open(folder / FACTS, "w") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


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
        f"checkpoint {path}: expected one of this model, got another: {len(differing)} "
        f"parameters differ, such as {name} with {theirs.get(name, 'no')} elements where this "
        f"model has {ours.get(name, 'none')}; resume with the model's configuration of that run"
    )


def _allocate_states(
    pipe: "Pipeline", stored: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return, by parameter, the stored optimizer entries with empty tensors to load into."""
    states: dict[str, dict[str, Any]] = {}
    by_prefix: dict[str, list[tuple[str, str]]] = {}
    for full in [*stored, *values]:
        prefix, _, key = full.rpartition(".")
        by_prefix.setdefault(prefix, []).append((key, full))
    for name, parameter in pipe.named_parameters():
        for key, full in by_prefix.get(f"optimizer.{name}", []):
            entry: Any = values.get(full)
            meta = stored.get(full)
            if isinstance(meta, TensorStorageMetadata):
                # A scalar such as Adam's step counter lives on the CPU, moments where the
                # parameter is: as torch's optimizers make them.
                device = parameter.device if meta.size == parameter.shape else "cpu"
                entry = torch.empty(meta.size, dtype=meta.properties.dtype, device=device)
            states.setdefault(name, {})[key] = entry
    return states


def _set_optimizer(
    pipe: "Pipeline", optimizer: torch.optim.Optimizer, states: Mapping[str, dict[str, Any]]
) -> None:
    optimizer.state.clear()
    for name, parameter in pipe.named_parameters():
        if name in states:
            optimizer.state[parameter] = states[name]


@contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Say in a line what torch's checkpointing tells in tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        whose = f" on rank {rank}" if what == "written" else ""
        raise CheckpointError(
            f"checkpoint {path}: expected it to be {what}, got {type(cause).__name__}: {cause}"
            f"{whose}; look at the disk, or use another folder"
        ) from cause
    except RuntimeError as error:
        raise lost(error, "a rank at the checkpoint") from error


@contextmanager
def _alone() -> Iterator[None]:
    """Let one rank read or write by itself: meant here, so torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sync_folder(folder: Path) -> None:
    """Make a rename within `folder` last over a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
