"""Export a checkpoint in one process, a file at a time: neither ranks nor the whole model."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gpipe_hpc.checkpoint import read_facts, read_metadata
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.export.files import SHARD_BYTES, ExportFolder, Shard, companion_files, in_files
from gpipe_hpc.models import Layer, build_layer, find_ties, global_name
from gpipe_hpc.models.huggingface.library import safetensors

_MODEL: Final = "model."  # ahead of the global names, in a checkpoint


def export_checkpoint(
    checkpoint: str | Path,
    layers: Sequence[Layer],
    folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the weights of a checkpoint to a new folder.

    `layers`: the model that was trained; none of it is allocated. A file holds whole layers.
    Raises as `export_safetensors`, and CheckpointError if the checkpoint is of another model.
    """
    source, target = Path(checkpoint), ExportFolder(folder)
    safetensors()
    read_facts(source)
    modules = [build_layer(x, index=i, seed=0, device="meta") for i, x in enumerate(layers)]
    empty = _tensors_of(source, layers, modules)
    target.prepare()
    files = _files([sum(t.nbytes for t in own.values()) for own in empty], shard_bytes)
    sizes = {}
    for number, indices in enumerate(files, start=1):
        shard: Shard = {}
        for index in indices:
            shard |= in_files(index, modules[index], _read(source, index, empty[index]))
        name, sizes_of_file = target.write(shard, number, len(files))
        sizes[name] = sizes_of_file
    target.finish(sizes, companion_files(modules))
    return target.path


def _tensors_of(source: Path, layers: Sequence[Layer], modules: Sequence[nn.Module]) -> list[Shard]:
    """Return each layer's tensors in the checkpoint, without values, by the names in it."""
    stored = read_metadata(source).state_dict_metadata
    repeated = {place for tie in find_ties(layers) for place in tie.places[1:]}
    found: list[Shard] = []
    for index, module in enumerate(modules):
        own: Shard = {}
        for name, tensor in module.state_dict().items():
            if (index, name) in repeated:
                continue
            key = f"{_MODEL}{global_name(index, name)}"
            entry = stored.get(key)
            if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.shape:
                got = "none" if entry is None else list(getattr(entry, "size", ()))
                raise CheckpointError(
                    f"export: {source} is of another model, expected {global_name(index, name)} "
                    f"of shape {list(tensor.shape)}, got {got}; use the model of that run"
                )
            own[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        found.append(own)
    return found


def _files(layer_bytes: Sequence[int], shard_bytes: int) -> list[list[int]]:
    """Cut layers into files; those without tensors go with others."""
    files: list[list[int]] = [[]]
    room = shard_bytes
    for index, size in enumerate(layer_bytes):
        if size > room and room < shard_bytes:
            files.append([])
            room = shard_bytes
        files[-1].append(index)
        room -= size
    return files


def _read(source: Path, index: int, empty: Shard) -> Shard:
    targets = {
        f"{_MODEL}{global_name(index, name)}": torch.empty_like(tensor, device="cpu")
        for name, tensor in empty.items()
    }
    with warnings.catch_warnings():
        # One process reads by itself: meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            state_dict_loader.load(targets, storage_reader=FileSystemReader(source), no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(
                f"export: expected to read layer {index} from {source}, got {error}; look at the "
                f"disk, or export another checkpoint"
            ) from error
    return dict(zip(empty, targets.values(), strict=True))
