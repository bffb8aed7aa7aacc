"""Write a folder of safetensors files with an index; the folder appears by one rename."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from gpipe_hpc.checkpoint import PARTIAL_SUFFIX, sync
from gpipe_hpc.errors import CheckpointError, ConfigError, ModelError, os_remedy
from gpipe_hpc.models.huggingface.library import safetensors, safetensors_torch

INDEX_FILE: Final = "model.safetensors.index.json"
DEFAULT_PREFIX: Final = "layers."
"""Prefix used in checkpoints and messages; "" gives the names of a plain nn.Sequential."""

SHARD_BYTES: Final = 5_000_000_000
"""Maximum size of a file, as in transformers, unless a single tensor or layer is larger."""

Shard = dict[str, Tensor]
Companion = str | Path
"""The text of a file, or the path of a file to copy."""

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


@runtime_checkable
class Exporting(Protocol):
    """Interface of a layer that has its own tensor names in exported files.

    `num_layers` is the number of layers of the model.
    """

    @property
    def num_layers(self) -> int:
        """Return the number of layers of the model."""

    def exported(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename tensors from their names in the layer to their names in files."""

    def companion_files(self, dtype: torch.dtype) -> Mapping[str, Companion]:
        """Return files to write next to the weights, by name: their text, or a path to copy."""


class ExportFolder:
    """A new folder of exported weights, which appears under its final name only when complete.

    Args:
        folder: The new folder.
        dtype: Name of the dtype of weights in the files; None: unchanged. Raises ConfigError for an
            unknown one.
        prefix: Text before the index of a layer in tensor names.
    """

    def __init__(
        self, folder: str | Path, dtype: str | None = None, prefix: str = DEFAULT_PREFIX
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(
                f"export: unknown dtype, expected {', '.join(DTYPES)} or null to keep that of the "
                f"weights, got {dtype!r}; choose one of them"
            )
        self.dtype = None if dtype is None else DTYPES[dtype]
        self.prefix = prefix
        self.path = Path(folder).absolute()
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)

    def prepare(self) -> None:
        """Create the temporary folder; raise CheckpointError if the final folder exists."""
        if os.path.lexists(self.path):
            raise CheckpointError(
                f"export: {self.path} exists already; remove it or name another folder"
            )
        shutil.rmtree(self.partial, ignore_errors=True)
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise _unwritten(self.partial, error) from error

    def write(self, shard: Shard, number: int, total: int) -> tuple[str, dict[str, int]]:
        """Write file `number` (from 1) of `total`; return its name and the bytes of each tensor."""
        name = f"model-{number:05d}-of-{total:05d}" if total > 1 else "model"
        file = self.partial / f"{name}.safetensors"
        values: Shard = {}
        seen: set[int] = set()
        for key, tensor in shard.items():
            value = self._cast(tensor.detach()).cpu().contiguous()
            # A tied tensor under a second name: safetensors refuses shared memory, so copy it.
            storage = value.untyped_storage().data_ptr()
            values[key] = value.clone() if storage in seen else value
            seen.add(storage)
        try:
            safetensors_torch().save_file(values, file, metadata={"format": "pt"})
            sync(file)
        except (OSError, safetensors().SafetensorError) as error:
            raise _unwritten(file, error) from error
        return file.name, {name: tensor.nbytes for name, tensor in values.items()}

    def _cast(self, tensor: Tensor) -> Tensor:
        is_kept = self.dtype is None or not tensor.is_floating_point()
        return tensor if is_kept else tensor.to(self.dtype)

    def named(self, index: int, layer: nn.Module, own: Shard) -> Shard:
        """Rename the tensors of a layer from their names in the layer to their names in files.

        Raises ConfigError for a `prefix` if the layer has its own names.
        """
        if not isinstance(layer, Exporting):
            return {f"{self.prefix}{index}.{name}": tensor for name, tensor in own.items()}
        if self.prefix != DEFAULT_PREFIX:
            raise ConfigError(
                f"config: bad export.prefix, expected {DEFAULT_PREFIX!r} for a "
                f"transformers model, which keeps its own weight names, got {self.prefix!r}; "
                f"leave it out"
            )
        return layer.exported(own)

    def companion_files(self, layers: Iterable[nn.Module]) -> Mapping[str, Companion]:
        """Return the files to write next to the weights, from the first layer that has some."""
        for layer in layers:
            dtypes = [p.dtype for p in layer.parameters() if p.is_floating_point()]
            if dtypes and isinstance(layer, Exporting):
                return layer.companion_files(self.dtype or dtypes[0])
        return {}

    def finish(
        self, sizes: Mapping[str, Mapping[str, int]], companions: Mapping[str, Companion]
    ) -> None:
        """Write the index and companion files, and rename the folder to its final name."""
        texts = dict(companions)
        if len(sizes) > 1:
            index = {
                "metadata": {"total_size": sum(sum(part.values()) for part in sizes.values())},
                "weight_map": {n: file for file, part in sizes.items() for n in part},
            }
            texts[INDEX_FILE] = json.dumps(index, indent=2, sort_keys=True) + "\n"
        try:
            for name, content in texts.items():
                file = self.partial / name
                file.parent.mkdir(exist_ok=True)
                if isinstance(content, Path):
                    shutil.copyfile(content, file)
                else:
                    file.write_text(content, "utf-8")
                sync(file)
            for folder in {self.partial, *((self.partial / name).parent for name in texts)}:
                sync(folder)
            os.rename(self.partial, self.path)
            sync(self.path.parent)
        except OSError as error:
            raise _unwritten(self.path, error) from error


def refuse_parts(num_own: int, num_layers: int) -> None:
    """Raise ModelError if only some layers of a transformers model are exported under its names."""
    if 0 < num_own < num_layers:
        raise ModelError(
            f"export: expected {num_layers} layers made by huggingface_layers, got {num_own}; "
            f"transformers would initialize the weights of the other layers randomly; unwrap "
            f"these, or save a checkpoint instead"
        )


def _unwritten(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"export: {path} cannot be written: {type(error).__name__}: {error}; "
        f"{os_remedy(error) or 'check the disk, or use another folder'}"
    )
