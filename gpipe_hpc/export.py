"""Export trained weights to safetensors, rank by rank: no rank ever holds more than its own.

    from gpipe_hpc.export import export_safetensors
    export_safetensors(pipe, "exported")

A model of transformers is stored under its own names with its config.json, so that
`from_pretrained` reads the folder; any other model under `layers.<index>.<name>`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from gpipe_hpc.comm.world import together
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.models.huggingface.library import safetensors, safetensors_torch
from gpipe_hpc.models.naming import global_name

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

INDEX_FILE: Final = "model.safetensors.index.json"
SHARD_BYTES: Final = 5_000_000_000
_PARTIAL_SUFFIX: Final = ".partial"

Shard = dict[str, Tensor]


@runtime_checkable
class Exporting(Protocol):
    """A layer with its own mind about how it is exported."""

    def exported(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the layer, given by their names in it, by their names in files."""

    def companion_files(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the text files that go with the model's weights, by name."""


def export_safetensors(
    pipe: "Pipeline", folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write all parameters and kept buffers to a new folder; every rank calls it.

    Each stage writes its own files, of at most `shard_bytes` if its tensors allow; the first rank
    writes the index. The folder appears whole, by one rename, or not at all. Tied parameters
    are stored once. Raises CheckpointError if the folder exists or cannot be written, and
    ConfigError where safetensors is not installed.
    """
    path = Path(folder).absolute()
    with together(pipe.world, f"export to {path}"):
        partial = path.with_name(path.name + _PARTIAL_SUFFIX)
        safetensors()
        if pipe.world.rank == 0:
            _prepare(path, partial)
        shards = {s: _shards(tensors, shard_bytes) for s, tensors in _own_tensors(pipe).items()}
        numbers: dict[int, int] = {}
        for counts in pipe.everybody.all_gather_object(
            {s: len(all_) for s, all_ in shards.items()}
        ):
            numbers |= counts
        written = _write(shards, numbers, partial)
        gathered = pipe.everybody.all_gather_object((written, _companions(pipe)))
        if pipe.world.rank == 0:
            _finish(gathered, path, partial)
        pipe.everybody.all_gather_object("exported")
    return path


def _prepare(path: Path, partial: Path) -> None:
    if path.exists():
        raise CheckpointError(
            f"export: expected a new folder, got {path}, which exists; remove it or name another"
        )
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise _unwritten(partial, error) from error


def _own_tensors(pipe: "Pipeline") -> dict[int, Shard]:
    """Return what this rank is to write of each stage, by the names in files."""
    found: dict[int, Shard] = {}
    for index, stage in pipe.stages.items():
        # One of those that hold a copy of the stage writes it.
        if pipe.replica or pipe.schedule.placement.holders(index)[0] != pipe.stage_rank:
            continue
        named: dict[str, Tensor] = {
            name: parameter.detach()
            for name, parameter in stage.named_parameters().items()
            if stage.owns(name)
        }
        named |= stage.named_buffers()
        found[index] = {}
        for layer, module in stage.layers.items():
            prefix = global_name(layer, "")
            own = {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}
            if isinstance(module, Exporting):
                found[index] |= module.exported(own)
            else:
                found[index] |= {prefix + name: tensor for name, tensor in own.items()}
    return found


def _shards(tensors: Shard, shard_bytes: int) -> list[Shard]:
    """Cut the tensors of a stage into files."""
    shards: list[Shard] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _write(
    shards: Mapping[int, list[Shard]], numbers: Mapping[int, int], partial: Path
) -> dict[str, dict[str, int]]:
    """Write this rank's files; return the bytes of each tensor in each."""
    total = sum(numbers.values())
    written: dict[str, dict[str, int]] = {}
    for stage, files in shards.items():
        ahead = sum(count for other, count in numbers.items() if other < stage)
        for number, shard in enumerate(files, start=ahead + 1):
            name = f"model-{number:05d}-of-{total:05d}" if total > 1 else "model"
            file = partial / f"{name}.safetensors"
            values = {n: t.detach().cpu().contiguous() for n, t in shard.items()}
            try:
                safetensors_torch().save_file(values, file, metadata={"format": "pt"})
            except (OSError, safetensors().SafetensorError) as error:
                raise _unwritten(file, error) from error
            _sync(file)
            written[file.name] = {n: t.nbytes for n, t in shard.items()}
    return written


def _companions(pipe: "Pipeline") -> dict[str, str]:
    """Return the text files of the first of this rank's layers that has some."""
    for stage in pipe.stages.values():
        for layer in stage.layers.values():
            dtypes = [p.dtype for p in layer.parameters() if p.is_floating_point()]
            if dtypes and isinstance(layer, Exporting):
                return layer.companion_files(dtypes[0])
    return {}


def _finish(
    gathered: list[tuple[dict[str, dict[str, int]], dict[str, str]]], path: Path, partial: Path
) -> None:
    """Write the index and what goes with it, and give the folder its name."""
    files: dict[str, str] = {}
    sizes: dict[str, dict[str, int]] = {}
    for written, companions in gathered:
        sizes |= written
        files |= companions
    if len(sizes) > 1:
        index = {
            "metadata": {"total_size": sum(sum(part.values()) for part in sizes.values())},
            "weight_map": {n: file for file, part in sorted(sizes.items()) for n in part},
        }
        files[INDEX_FILE] = json.dumps(index, indent=2, sort_keys=True) + "\n"
    try:
        for name, text in files.items():
            (partial / name).write_text(text, "utf-8")
            _sync(partial / name)
        os.rename(partial, path)
        _sync(path.parent)
    except OSError as error:
        raise _unwritten(path, error) from error


def _sync(path: Path) -> None:
    """Make a file, or a rename within a folder, last over a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritten(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"export: {path} cannot be written, expected a folder with room, got "
        f"{type(error).__name__}: {error}; look at the disk, or use another folder"
    )
