"""Write a checkpoint: all ranks write into one folder, in four phases.

1. `collect` determines what is written and by which rank (collective). 2. The first rank creates
the folder under a temporary name. 3. `write_files`: each rank writes its tensors, syncs its file
and hashes it, without communication. 4. The first rank writes the list of tensors and the manifest,
and renames the folder.

Every file and folder is synced to disk before the rename, and the rename before `save` returns.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.checkpoint.agreement import all_or_none, raise_first
from gpipe_hpc.checkpoint.blocks import BLOCK_BYTES, blocks_of, digests
from gpipe_hpc.checkpoint.contents import Contents, collect
from gpipe_hpc.checkpoint.folder import PARTIAL_SUFFIX, error_text, is_ours, space_remedy, sync
from gpipe_hpc.checkpoint.manifest import MANIFEST, METADATA, TYPED, Facts, manifest_text
from gpipe_hpc.checkpoint.metadata import StoredTensor, listed
from gpipe_hpc.errors import CheckpointError, os_remedy

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

log = logging.getLogger("gpipe_hpc.checkpoint")


_MOST_EXTRA: Final = 64 * 2**20


class WrittenTensors(NamedTuple):
    """Descriptions of tensors that a rank has written, and manifest entries for its files."""

    tensors: dict[str, StoredTensor]
    files: dict[str, dict[str, Any]]


class PendingCheckpoint(NamedTuple):
    """A checkpoint whose folder exists, and the contents that all ranks write into it."""

    path: Path
    partial: Path
    contents: Contents


def save(
    pipe: "Pipeline",
    path: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[Any, Any] | None,
) -> Path:
    """Write the checkpoint `path`; a tensor present on several ranks is stored once. Collective.

    Raises CheckpointError on all ranks if `path` exists or cannot be written; nothing remains then.
    """
    begun = begin(pipe, path, optimizer, extra)
    return end(pipe, begun, write(begun, pipe.world.rank))


def begin(
    pipe: "Pipeline",
    path: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[Any, Any] | None,
) -> PendingCheckpoint:
    """Collect the contents of a checkpoint and create its temporary folder. Collective."""
    pipe.log_pending()
    path = path.absolute()
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    contents = collect(pipe, optimizer, extra)
    leads = _leads(pipe)
    all_or_none(
        pipe.world_group, lambda: _prepare(path, partial, contents.facts) if leads else None
    )
    return PendingCheckpoint(path, partial, contents)


def write(begun: PendingCheckpoint, rank: int) -> WrittenTensors | CheckpointError:
    """Write a rank's tensors, from any thread; return the result, or the error as a value."""
    try:
        return write_files(begun.contents.tensors, begun.partial, rank)
    except Exception as error:  # torch's writer may raise anything
        return _unwritten(begun.path, error, begun.contents.num_bytes)


def end(
    pipe: "Pipeline", begun: PendingCheckpoint, written: WrittenTensors | CheckpointError
) -> Path:
    """Complete the checkpoint after all ranks have written, or remove it on failure. Collective."""
    path, partial, contents = begun
    leads = _leads(pipe)
    refusal = written if isinstance(written, CheckpointError) else None
    first = pipe.world_group.ranks[0]
    told = pipe.world_group.gather_object(None if refusal else written, first) or []
    # Remove only after all ranks have finished writing and have measured the free space.
    if leads and any(part is None for part in told):
        shutil.rmtree(partial, ignore_errors=True)
    raise_first(pipe.world_group, refusal)
    all_or_none(pipe.world_group, lambda: commit(path, partial, contents, told) if leads else None)
    return path


def _leads(pipe: "Pipeline") -> bool:
    return pipe.world.rank == pipe.world_group.ranks[0]


def _prepare(path: Path, partial: Path, facts: Facts) -> None:
    """Create the temporary folder durably; raise CheckpointError if saving is impossible."""
    size = len(json.dumps([facts["extra"], facts["values"], facts.get(TYPED)]))
    if size > _MOST_EXTRA:
        raise CheckpointError(
            f"checkpoint {path}: `extra` and optimizer values other than tensors may have at most "
            f"{_MOST_EXTRA:,} bytes, got {size:,}; store large data in a separate file"
        )
    try:
        if path.exists():
            raise CheckpointError(
                f"checkpoint {path} already exists; {_free(path)} is "
                f"free, and pipe.save(folder, step=...) chooses a name itself"
            )
        _clear(partial)
        missing = [folder for folder in partial.parents if not folder.exists()]
        partial.mkdir(parents=True)
        for folder in missing:
            sync(folder.parent)
        # First of all, so that the owner of an incomplete checkpoint is known.
        (partial / MANIFEST).write_text(json.dumps({"extra": facts["extra"]}))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: the folder cannot be created: {error}; "
            f"{os_remedy(error) or 'choose a writable path'}"
        ) from error


def _free(path: Path) -> Path:
    """Return an unused path: the given one with a number appended."""
    number = 2
    while os.path.lexists(path.with_name(f"{path.name}_{number}")):
        number += 1
    return path.with_name(f"{path.name}_{number}")


def _clear(partial: Path) -> None:
    """Remove the files of an interrupted save; raise CheckpointError if there are others."""
    if not os.path.lexists(partial):
        return
    is_folder = partial.is_dir() and not partial.is_symlink()
    strange = (
        [p.name for p in partial.iterdir() if not is_ours(p.name)] if is_folder else ["a file"]
    )
    if strange:
        raise CheckpointError(
            f"checkpoint {partial} contains something other than an "
            f"interrupted save: {strange[0]}; move it away, or choose another path"
        )
    shutil.rmtree(partial)


def write_files(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> WrittenTensors:
    """Write a rank's tensors into its own file and sync it to disk, without communication.

    Raises OSError, and any error of torch's writer.
    """
    if not tensors:
        return WrittenTensors({}, {})
    from gpipe_hpc.checkpoint.dcp import write_tensors

    stored = write_tensors(tensors, folder, rank)
    files = {tensor.file for tensor in stored.values()}
    return WrittenTensors(stored, {name: _entry(folder / name) for name in sorted(files)})


def _entry(file: Path) -> dict[str, Any]:
    """Return the manifest's entry for a file: its size and hashes.

    Call it right after writing, while the file is in the page cache.
    """
    num_bytes = file.stat().st_size
    found = digests(blocks_of(file, num_bytes))
    for digest in found:
        if isinstance(digest, OSError):
            raise digest
    return {"bytes": num_bytes, "sha256": found}


def commit(path: Path, partial: Path, contents: Contents, parts: Sequence[WrittenTensors]) -> None:
    """Write the metadata and manifest, and rename the folder; called by one rank.

    Raises CheckpointError if this fails; nothing remains then.
    """
    try:
        tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        _check_visible(partial, parts)
        from gpipe_hpc.checkpoint.dcp import write_metadata

        write_metadata(partial, tensors)
        facts = dict(contents.facts)
        facts["tensors"] = {name: listed(tensor) for name, tensor in sorted(tensors.items())}
        facts["block_bytes"] = BLOCK_BYTES
        facts["files"] = {name: entry for part in parts for name, entry in part.files.items()}
        facts["files"][METADATA] = _entry(partial / METADATA)
        (partial / MANIFEST).write_bytes(manifest_text(facts))
        sync(partial / MANIFEST)
        sync(partial)
        os.rename(partial, path)
    except Exception as error:  # torch's writer may raise anything
        refusal = _unwritten(path, error, contents.num_bytes)
        shutil.rmtree(partial, ignore_errors=True)
        raise refusal from error
    try:
        sync(path.parent)
    except OSError as error:
        log.warning("checkpoint %s: complete, but a power failure may lose it: %s", path, error)


def _check_visible(partial: Path, parts: Sequence[WrittenTensors]) -> None:
    """Raise OSError unless the files of all ranks are visible in this rank's folder."""
    for rank, part in enumerate(parts):
        for name, entry in part.files.items():
            size = (partial / name).stat().st_size if (partial / name).exists() else None
            if size != entry["bytes"]:
                raise OSError(
                    f"{name} of rank {rank} is not visible here: expected {entry['bytes']} bytes, "
                    f"got {'none' if size is None else size} (is the folder shared by all "
                    f"machines?)"
                )


def _unwritten(path: Path, error: Exception, needed_bytes: int) -> CheckpointError:
    cause = _os_cause(error)
    remedy = space_remedy(path.parent, needed_bytes, cause)
    refusal = CheckpointError(
        f"checkpoint {path} cannot be written: {error_text(cause or error)}; {remedy}"
    )
    refusal.__cause__ = error
    return refusal


def _os_cause(error: BaseException | None) -> OSError | None:
    """Return the operating system's error that caused an error of torch, if there is one."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None
