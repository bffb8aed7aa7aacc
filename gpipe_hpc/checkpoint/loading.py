"""Reading a checkpoint: each rank takes what it holds, whatever the layout at saving was."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gpipe_hpc.checkpoint.folder import (
    alone,
    model_tensors,
    named,
    other_checkpoint,
    read_facts,
    read_metadata,
)
from gpipe_hpc.checkpoint.options import stored_options
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


def load(pipe: "Pipeline", path: Path, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Fill the pipeline's parameters and buffers, and the optimizer; return `extra`.

    The layout may be another one than at saving. The optimizer's groups take the options that
    their parameters had, but for how a machine computes (foreach, fused, capturable,
    differentiable). Raises CheckpointError if there is no whole checkpoint at `path`, it is of
    another model or kind of optimizer, or one group's parameters had different options.
    """
    path = path.absolute()
    facts = read_facts(path)
    _check_model(pipe, path, facts)
    stored = read_metadata(path).state_dict_metadata
    targets = model_tensors(pipe)
    states: dict[str, dict[str, Any]] = {}
    options: list[dict[str, Any]] = []
    if optimizer is not None:
        groups = facts.get("optimizer", [])
        options = stored_options(pipe.named_parameters(), optimizer, groups, path)
        states = _allocate_states(pipe, optimizer, stored, facts["values"])
        targets |= {
            f"optimizer.{name}.{key}": value
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
    with alone(), named(path, "read", lambda: other_checkpoint(path)):
        state_dict_loader.load(targets, storage_reader=FileSystemReader(path), no_dist=True)
    if optimizer is not None:
        _set_optimizer(pipe, optimizer, states, options)
    pipe.restore_position(facts["steps_done"], facts["loss_weight"], facts.get("loss_scale"))
    extra: dict[str, Any] = facts["extra"]
    return extra


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
    pipe: "Pipeline",
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Any],
    values: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return, by parameter, the stored optimizer entries with empty tensors to load into."""
    states: dict[str, dict[str, Any]] = {}
    by_prefix: dict[str, list[tuple[str, str]]] = {}
    for full in [*stored, *values]:
        prefix, _, key = full.rpartition(".")
        by_prefix.setdefault(prefix, []).append((key, full))
    counts_on_device = {
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group.get("capturable") or group.get("fused")
    }
    for name, parameter in pipe.named_parameters():
        for key, full in by_prefix.get(f"optimizer.{name}", []):
            entry: Any = values.get(full)
            meta = stored.get(full)
            if isinstance(meta, TensorStorageMetadata):
                # As in torch's load_state_dict: the counter of steps lives on the CPU unless
                # kernels read it, all else where the parameter is.
                is_beside = key != "step" or parameter in counts_on_device
                device = parameter.device if is_beside else "cpu"
                entry = torch.empty(meta.size, dtype=meta.properties.dtype, device=device)
            states.setdefault(name, {})[key] = entry
    return states


def _set_optimizer(
    pipe: "Pipeline",
    optimizer: torch.optim.Optimizer,
    states: Mapping[str, dict[str, Any]],
    options: list[dict[str, Any]],
) -> None:
    optimizer.state.clear()
    for name, parameter in pipe.named_parameters():
        if name in states:
            optimizer.state[parameter] = states[name]
    for group, stored in zip(optimizer.param_groups, options, strict=True):
        group.update(stored)
