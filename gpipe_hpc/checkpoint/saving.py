"""Writing a checkpoint: all ranks into one folder."""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe_hpc.checkpoint.folder import (
    FACTS,
    PARTIAL_SUFFIX,
    alone,
    model_tensors,
    named,
    room_at,
    sync,
)
from gpipe_hpc.checkpoint.options import describe_groups, merge_groups
from gpipe_hpc.comm.group import broadcast_object
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

log = logging.getLogger("gpipe_hpc.checkpoint")

_OURS: Final = re.compile(rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|{re.escape(FACTS)}").fullmatch


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
    _first_does(pipe, lambda: _prepare(path, partial, extra))
    tensors = model_tensors(pipe)
    values: dict[str, Any] = {}
    if optimizer is not None:
        _split(_optimizer_state(pipe, optimizer), tensors, values)
    needed_bytes = _num_bytes(pipe, optimizer)
    _write(pipe, tensors, partial, needed_bytes)
    groups = [] if optimizer is None else describe_groups(pipe.named_parameters(), optimizer)
    gathered = pipe.everybody.all_gather_object((values, groups))
    merged = {name: value for part, _ in gathered for name, value in part.items()}
    facts = _facts(pipe, merged, merge_groups(part for _, part in gathered), extra)
    _first_does(pipe, lambda: _finish(path, partial, facts, needed_bytes))
    return path


def _first_does(pipe: "Pipeline", action: Callable[[], None]) -> None:
    """Let rank 0 do something for all; CheckpointError on every rank if it cannot."""
    refusal = None
    if pipe.world.rank == 0:
        try:
            action()
        except CheckpointError as error:
            refusal = error
    told: str | None = broadcast_object(pipe.everybody, refusal and str(refusal), root=0)
    if told is not None:
        raise refusal or CheckpointError(told)


def _prepare(path: Path, partial: Path, extra: Mapping[str, Any]) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: expected `extra` to hold what JSON can, got {error}; turn tensors "
            f"into numbers or lists"
        ) from error
    try:
        if path.exists():
            raise CheckpointError(f"checkpoint {path}: expected a new name, got an existing one")
        _clear(partial)
        partial.mkdir(parents=True)
        # First of all, so that what a kill cuts short says whose it is.
        (partial / FACTS).write_text(json.dumps({"extra": dict(extra)}))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: expected to make a folder there, got {error}; choose a path that "
            f"can be written"
        ) from error


def _clear(partial: Path) -> None:
    """Remove what a kill left of an earlier save; CheckpointError if it is something else."""
    if not os.path.lexists(partial):
        return
    is_folder = partial.is_dir() and not partial.is_symlink()
    strange = [p.name for p in partial.iterdir() if not _OURS(p.name)] if is_folder else ["a file"]
    if strange:
        raise CheckpointError(
            f"checkpoint {partial}: expected at most what an earlier save left, got "
            f"{strange[0]}; move it away, or choose another path"
        )
    shutil.rmtree(partial)


def _finish(path: Path, partial: Path, facts: Mapping[str, Any], needed_bytes: int) -> None:
    try:
        with open(partial / FACTS, "w") as file:
            json.dump(facts, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, path)
    except (OSError, TypeError, ValueError) as error:
        remedy = room_at(partial, needed_bytes)
        if not isinstance(error, OSError):
            remedy = "use an optimizer whose state is of tensors and what JSON can hold"
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {path}: expected it to be written, got {error}; {remedy}"
        ) from error
    try:
        sync(path.parent)
    except OSError as error:
        log.warning("checkpoint %s: whole, but may be lost with a power cut: %s", path, error)


def _optimizer_state(pipe: "Pipeline", optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state of this rank's parameters as optimizer.<name>.<key>."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in pipe.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _split(state: Mapping[str, Any], tensors: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in state.items():
        (tensors if isinstance(value, torch.Tensor) else values)[name] = value


def _num_bytes(pipe: "Pipeline", optimizer: torch.optim.Optimizer | None) -> int:
    """Return about how much all ranks will write: each stage counts once, however many hold it."""
    own: dict[int, int] = {}
    for index, stage in pipe.stages.items():
        parameters = list(stage.named_parameters().values())
        tensors = [*parameters, *stage.named_buffers().values()]
        if optimizer is not None:
            states = (optimizer.state.get(parameter, {}) for parameter in parameters)
            tensors += [value for state in states for value in state.values()]
        own[index] = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    gathered = pipe.everybody.all_gather_object(own)
    return sum({index: size for part in gathered for index, size in part.items()}.values())


def _write(pipe: "Pipeline", tensors: dict[str, Any], folder: Path, needed_bytes: int) -> None:
    """Write this rank's tensors; what a failure leaves is removed, once no rank writes."""
    try:
        _write_tensors(pipe, tensors, folder, lambda: room_at(folder, needed_bytes))
    except CheckpointError:
        # Torch tells all ranks of a failure after every one has ended its writing. They have
        # looked at the room before the first one makes more.
        with contextlib.suppress(ConnectionError, TimeoutError):
            if pipe.everybody.torch_group is not None:
                pipe.everybody.all_gather_object("failed to write")
            if pipe.world.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_tensors(
    pipe: "Pipeline", tensors: dict[str, Any], folder: Path, remedy: Callable[[], str]
) -> None:
    group = pipe.everybody.torch_group
    if group is not None:
        with named(folder, "written", remedy):
            writer = FileSystemWriter(folder)
            state_dict_saver.save(tensors, storage_writer=writer, process_group=group)
        return
    # Threads, or one rank: the first one writes for all.
    gathered = pipe.everybody.all_gather_object(tensors)
    if pipe.world.rank == 0:
        merged = {name: value for part in gathered for name, value in part.items()}
        with alone(), named(folder, "written", remedy):
            state_dict_saver.save(merged, storage_writer=FileSystemWriter(folder), no_dist=True)
    pipe.everybody.all_gather_object("tensors are written")


def _facts(
    pipe: "Pipeline",
    values: Mapping[str, Any],
    groups: list[dict[str, Any]],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    return {
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
        "optimizer": groups,
        "extra": dict(extra),
    }
