"""Read and write tensors in torch.distributed.checkpoint's file format, with torch's own classes.

Imported only by the first save or load: importing torch.distributed.checkpoint takes more CPU time
than all of this package.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from gpipe_hpc.checkpoint.metadata import StoredTensor
from gpipe_hpc.device.device import on_host
from gpipe_hpc.torch_compat import storage_info

_COPIED_AHEAD: Final = 10_000_000  # bytes of tensors on a device; torch's default


def write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, rank: int
) -> dict[str, StoredTensor]:
    """Write a rank's tensors into files of its own; return their descriptions and locations.

    Needs no communication. Raises OSError, and any error of torch's writer.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    plan = planner.create_local_plan()
    # If tensors are on a GPU, torch copies ahead on its stream and synchronizes it.
    is_here = all(map(on_host, tensors.values()))
    ahead = 0 if is_here else _COPIED_AHEAD
    writer = FileSystemWriter(folder, per_thread_copy_ahead=ahead)
    # Torch names files by the index of the plan among all ranks.
    plan = writer.prepare_global_plan([plan] * (rank + 1))[rank]
    stored: dict[str, StoredTensor] = {}
    for result in writer.write_data(plan, planner).wait():
        name, place = result.index.fqn, result.storage_data
        kind = tensors[name]
        stored[name] = StoredTensor(
            kind.shape, kind.dtype, place.relative_path, place.offset, place.length
        )
    return stored


def write_metadata(path: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Write ``.metadata`` for tensors in files of the folder `path`, and sync it to disk."""
    metadata = _metadata(stored)
    # As torch's planner does for flat names.
    metadata.planner_data = {name: (name,) for name in stored}
    places = metadata.storage_data
    results = [WriteResult(index, place.length, place) for index, place in places.items()]
    _Writer(path).finish(metadata, [results])


def read_tensors(
    path: Path, stored: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]
) -> None:
    """Read tensors into `targets`, by name; see `gpipe_hpc.checkpoint.metadata.fill`."""
    reader, planner = FileSystemReader(path), DefaultLoadPlanner()
    metadata = _metadata({name: stored[name] for name in targets})
    try:
        planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    except OSError:
        raise
    except Exception as error:  # torch's reader may raise anything
        what = str(error) or "truncated file"
        raise ValueError(f"{type(error).__name__}: {what}") from error


class _Writer(FileSystemWriter):
    """Torch's file writer, which does not record the folder's path on this machine."""

    def storage_meta(self) -> StorageMeta:
        """Return the identifier of this save."""
        return StorageMeta(save_id=self.save_id)


def _metadata(stored: Mapping[str, StoredTensor]) -> Metadata:
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, tensor in stored.items():
        start = torch.Size([0] * len(tensor.shape))
        piece = ChunkStorageMetadata(start, tensor.shape)
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, tensor.shape, [piece])
        index = MetadataIndex(name, start, 0)
        places[index] = storage_info()(tensor.file, tensor.offset, tensor.length)
    return Metadata(entries, storage_data=places)
