"""Export a checkpoint in one process, file by file, without loading the whole model."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_hpc.checkpoint import Verified, fill, verify
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.export.files import (
    DEFAULT_PREFIX,
    SHARD_BYTES,
    ExportFolder,
    Exporting,
    Shard,
    refuse_parts,
)
from gpipe_hpc.models import Layer, build_abstract, find_ties, first_names, global_name
from gpipe_hpc.models.huggingface.library import safetensors

log = logging.getLogger("gpipe_hpc.export")

_MODEL: Final = "model."  # prefix of the global names in a checkpoint


def export_checkpoint(
    checkpoint: str | Path | Verified,
    layers: Sequence[Layer],
    folder: str | Path,
    shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> Path:
    """Write the weights of a checkpoint to a new folder of safetensors files; return its path.

    A file contains whole layers; the model is not allocated. State of `get_extra_state` is omitted,
    with a warning. For `dtype`, `prefix` and tied parameters, see `export_safetensors`. Raises the
    errors of `export_safetensors`, and CheckpointError if the checkpoint is damaged or of another
    model.
    """
    target = ExportFolder(folder, dtype, prefix)
    safetensors()
    if isinstance(checkpoint, Verified):
        source = checkpoint
    else:
        source = verify(Path(checkpoint), SoloGroup(0), 0)
    modules = [build_abstract(x, index=i) for i, x in enumerate(layers)]
    empty = _tensors_of(source, layers, modules)
    for index, module in enumerate(modules):  # raises for a wrong prefix before anything is written
        target.named(index, module, {name: each.empty for name, each in empty[index].items()})
    parts = [module.num_layers for module in modules if isinstance(module, Exporting)]
    refuse_parts(len(parts), max(parts, default=0))
    target.prepare()
    files = _files([sum(t.empty.nbytes for t in own.values()) for own in empty], shard_bytes)
    sizes = {}
    for number, indices in enumerate(files, start=1):
        shard: Shard = {}
        for index in indices:
            shard |= target.named(index, modules[index], _read(source, index, empty[index]))
        name, sizes_of_file = target.write(shard, number, len(files))
        sizes[name] = sizes_of_file
    target.finish(sizes, target.companion_files(modules))
    return target.path


class _Stored(NamedTuple):
    """Name of a tensor in a checkpoint, and an empty tensor of its shape on the meta device."""

    key: str
    empty: Tensor


def _tensors_of(
    source: Verified, layers: Sequence[Layer], modules: Sequence[nn.Module]
) -> list[dict[str, _Stored]]:
    """Return the tensors of each layer with their names in the checkpoint.

    A tied parameter is stored under its first name only.
    """
    firsts = {place: tie.places[0] for tie in find_ties(layers) for place in tie.places}
    found: list[dict[str, _Stored]] = []
    for index, module in enumerate(modules):
        own: dict[str, _Stored] = {}
        aliases = first_names(module)
        for name, tensor in _kept(index, module):
            place = index, aliases.get(name, name)
            first = firsts.get(place, place)
            if first != (index, name) and isinstance(module, Exporting):
                continue
            key = f"{_MODEL}{global_name(*first)}"
            entry = source.stored.get(key)
            if entry is None or entry.shape != tensor.shape:
                got = "none" if entry is None else list(entry.shape)
                raise CheckpointError(
                    f"export: {source.path} is of another model, expected {global_name(*first)} "
                    f"of shape {list(tensor.shape)}, got {got}; use the model of that run"
                )
            own[name] = _Stored(key, torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        found.append(own)
    return found


def _kept(index: int, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of a layer; warn about other state."""
    for name, value in module.state_dict().items():
        if name.rpartition(".")[2] == "_extra_state":
            log.warning(
                "export: %s is left out, because safetensors files contain only tensors",
                global_name(index, name),
            )
        else:
            yield name, value


def _files(layer_bytes: Sequence[int], shard_bytes: int) -> list[list[int]]:
    """Divide layers into files of `shard_bytes`; layers without tensors join another file."""
    files: list[list[int]] = [[]]
    room = shard_bytes
    for index, size in enumerate(layer_bytes):
        if size > room and room < shard_bytes:
            files.append([])
            room = shard_bytes
        files[-1].append(index)
        room -= size
    return files


def _read(source: Verified, index: int, wanted: Mapping[str, _Stored]) -> Shard:
    targets = {key: torch.empty_like(empty, device="cpu") for key, empty in wanted.values()}
    try:
        fill(source.path, source.stored, targets)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"export: cannot read layer {index} from {source.path}: {error}; check the disk, or "
            "export another checkpoint"
        ) from error
    return {name: targets[key] for name, (key, _) in wanted.items()}
