"""A folder of safetensors files with an index, written aside and committed by one rename."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gpipe_hpc.checkpoint import PARTIAL_SUFFIX, sync
from gpipe_hpc.errors import CheckpointError
from gpipe_hpc.models import global_name
from gpipe_hpc.models.huggingface.library import safetensors, safetensors_torch

INDEX_FILE: Final = "model.safetensors.index.json"
SHARD_BYTES: Final = 5_000_000_000
"""What files hold at most, unless a single tensor or layer is larger: transformers' habit."""

Shard = dict[str, Tensor]


@runtime_checkable
class Exporting(Protocol):
    """A layer with its own mind about how it is exported."""

    def exported(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the layer, given by their names in it, by their names in files."""

    def companion_files(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the text files that go with the model's weights, by name."""


class ExportFolder:
    """A new folder under way; it has its name once `finish` has run."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).absolute()
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)

    def prepare(self) -> None:
        """Make the place where files are written; CheckpointError if the folder exists."""
        if self.path.exists():
            raise CheckpointError(
                f"export: expected a new folder, got {self.path}, which exists; remove it or name "
                f"another"
            )
        shutil.rmtree(self.partial, ignore_errors=True)
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise _unwritten(self.partial, error) from error

    def write(self, shard: Shard, number: int, total: int) -> tuple[str, dict[str, int]]:
        """Write file `number` of `total`, from 1; return its name and the bytes of each tensor."""
        name = f"model-{number:05d}-of-{total:05d}" if total > 1 else "model"
        file = self.partial / f"{name}.safetensors"
        values = {name: tensor.detach().cpu().contiguous() for name, tensor in shard.items()}
        try:
            safetensors_torch().save_file(values, file, metadata={"format": "pt"})
            sync(file)
        except (OSError, safetensors().SafetensorError) as error:
            raise _unwritten(file, error) from error
        return file.name, {name: tensor.nbytes for name, tensor in values.items()}

    def finish(self, sizes: Mapping[str, Mapping[str, int]], companions: Mapping[str, str]) -> None:
        """Write the index and what goes with it, and give the folder its name."""
        texts = dict(companions)
        if len(sizes) > 1:
            index = {
                "metadata": {"total_size": sum(sum(part.values()) for part in sizes.values())},
                "weight_map": {n: file for file, part in sizes.items() for n in part},
            }
            texts[INDEX_FILE] = json.dumps(index, indent=2, sort_keys=True) + "\n"
        try:
            for name, text in texts.items():
                (self.partial / name).write_text(text, "utf-8")
                sync(self.partial / name)
            os.rename(self.partial, self.path)
            sync(self.path.parent)
        except OSError as error:
            raise _unwritten(self.path, error) from error


def in_files(index: int, layer: nn.Module, own: Shard) -> Shard:
    """Return tensors of a layer, given by their names in it, by those in files."""
    if isinstance(layer, Exporting):
        return layer.exported(own)
    return {global_name(index, name): tensor for name, tensor in own.items()}


def companion_files(layers: Iterable[nn.Module]) -> dict[str, str]:
    """Return the text files of the first layer that has some."""
    for layer in layers:
        dtypes = [p.dtype for p in layer.parameters() if p.is_floating_point()]
        if dtypes and isinstance(layer, Exporting):
            return layer.companion_files(dtypes[0])
    return {}


def _unwritten(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"export: {path} cannot be written, expected a folder with room, got "
        f"{type(error).__name__}: {error}; look at the disk, or use another folder"
    )
