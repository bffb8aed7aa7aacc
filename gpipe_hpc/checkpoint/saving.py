"""Writing a checkpoint: all ranks into one folder, in steps.

1. `collect` says what there is to write, and who writes it (all ranks together).
2. The first rank makes the folder, under another name.
3. `write_files`: each rank writes its tensors, waits for the disk and takes the digests of its
   file, without a word to the others.
4. The first rank writes the list of tensors and the manifest, and renames the folder.

Every file and folder is on the disk before the rename, and the rename before `save` returns.
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
from gpipe_hpc.checkpoint.folder import PARTIAL_SUFFIX, is_ours, room_at, said, sync
from gpipe_hpc.checkpoint.manifest import MANIFEST, METADATA, TYPED, Facts, manifest_text
from gpipe_hpc.checkpoint.metadata import StoredTensor, listed
from gpipe_hpc.errors import CheckpointError, os_remedy

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

log = logging.getLogger("gpipe_hpc.checkpoint")


_MOST_EXTRA: Final = 64 * 2**20


class Written(NamedTuple):
    """What a rank has written: its tensors, and an entry of the manifest for each of its files."""

    tensors: dict[str, StoredTensor]
    files: dict[str, dict[str, Any]]


class Begun(NamedTuple):
    """A checkpoint whose folder is made, and what is to be written into it by all ranks."""

    path: Path
    partial: Path
    contents: Contents


def save(
    pipe: "Pipeline",
    path: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[Any, Any] | None,
) -> Path:
    """Write the checkpoint `path`; all ranks call it. Tensors on several ranks are stored once.

    Raises CheckpointError on all ranks if `path` exists or cannot be written; nothing remains then.
    """
    begun = begin(pipe, path, optimizer, extra)
    return end(pipe, begun, write(begun, pipe.world.rank))


def begin(
    pipe: "Pipeline",
    path: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[Any, Any] | None,
) -> Begun:
    """Collect what there is to write and make the folder; all ranks call it."""
    pipe.say_what_is_left()
    path = path.absolute()
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    contents = collect(pipe, optimizer, extra)
    leads = _leads(pipe)
    all_or_none(pipe.everybody, lambda: _prepare(path, partial, contents.facts) if leads else None)
    return Begun(path, partial, contents)


def write(begun: Begun, rank: int) -> Written | CheckpointError:
    """Write a rank's tensors, on any thread; return what was written, or why it was not."""
    try:
        return write_files(begun.contents.tensors, begun.partial, rank)
    except Exception as error:  # torch's writer raises what it likes
        return _unwritten(begun.path, error, begun.contents.num_bytes)


def end(pipe: "Pipeline", begun: Begun, written: Written | CheckpointError) -> Path:
    """Make a checkpoint of what all ranks have written, or leave nothing; all ranks call it."""
    path, partial, contents = begun
    leads = _leads(pipe)
    refusal = written if isinstance(written, CheckpointError) else None
    first = pipe.everybody.ranks[0]
    told = pipe.everybody.gather_object(None if refusal else written, first) or []
    # All ranks have ended their writing, and looked at the room, before one makes more.
    if leads and any(part is None for part in told):
        shutil.rmtree(partial, ignore_errors=True)
    raise_first(pipe.everybody, refusal)
    all_or_none(pipe.everybody, lambda: commit(path, partial, contents, told) if leads else None)
    return path


def _leads(pipe: "Pipeline") -> bool:
    return pipe.world.rank == pipe.everybody.ranks[0]


def _prepare(path: Path, partial: Path, facts: Facts) -> None:
    """Refuse what cannot be written, and make the folder; what is new is on the disk."""
    size = len(json.dumps([facts["extra"], facts["values"], facts.get(TYPED)]))
    if size > _MOST_EXTRA:
        raise CheckpointError(
            f"checkpoint {path}: expected at most {_MOST_EXTRA:,} bytes of `extra` and of values "
            f"of the optimizer that are no tensors, got {size:,}; keep large data in a file of "
            f"your own"
        )
    try:
        if path.exists():
            raise CheckpointError(
                f"checkpoint {path}: expected a new name, got an existing one; {_free(path)} is "
                f"free, and pipe.save(folder, step=...) finds a name by itself"
            )
        _clear(partial)
        missing = [folder for folder in partial.parents if not folder.exists()]
        partial.mkdir(parents=True)
        for folder in missing:
            sync(folder.parent)
        # First of all, so that what a kill cuts short says whose it is.
        (partial / MANIFEST).write_text(json.dumps({"extra": facts["extra"]}))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: expected to make a folder there, got {error}; "
            f"{os_remedy(error) or 'choose a path that can be written'}"
        ) from error


def _free(path: Path) -> Path:
    """Return a name like this one that nothing has."""
    number = 2
    while os.path.lexists(path.with_name(f"{path.name}_{number}")):
        number += 1
    return path.with_name(f"{path.name}_{number}")


def _clear(partial: Path) -> None:
    """Remove what a kill left of an earlier save; CheckpointError if it is something else."""
    if not os.path.lexists(partial):
        return
    is_folder = partial.is_dir() and not partial.is_symlink()
    strange = (
        [p.name for p in partial.iterdir() if not is_ours(p.name)] if is_folder else ["a file"]
    )
    if strange:
        raise CheckpointError(
            f"checkpoint {partial}: expected at most what an earlier save left, got "
            f"{strange[0]}; move it away, or choose another path"
        )
    shutil.rmtree(partial)


def write_files(tensors: Mapping[str, Tensor], folder: Path, rank: int) -> Written:
    """Write a rank's tensors into a file of its own, and return when it is on the disk.

    Needs no other rank, and nothing but these tensors. Raises what torch's writer does, and
    OSError.
    """
    if not tensors:
        return Written({}, {})
    from gpipe_hpc.checkpoint.dcp import write_tensors

    stored = write_tensors(tensors, folder, rank)
    files = {tensor.file for tensor in stored.values()}
    return Written(stored, {name: _entry(folder / name) for name in sorted(files)})


def _entry(file: Path) -> dict[str, Any]:
    """Return what the manifest says of a file; it is read while it is still in memory."""
    num_bytes = file.stat().st_size
    found = digests(blocks_of(file, num_bytes))
    for digest in found:
        if isinstance(digest, OSError):
            raise digest
    return {"bytes": num_bytes, "sha256": found}


def commit(path: Path, partial: Path, contents: Contents, parts: Sequence[Written]) -> None:
    """Make a checkpoint of what all ranks have written; called by one of them.

    Raises CheckpointError if that cannot be; then nothing is left of it.
    """
    try:
        tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        _check_here(partial, parts)
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
    except Exception as error:  # torch's writer raises what it likes
        refusal = _unwritten(path, error, contents.num_bytes)
        shutil.rmtree(partial, ignore_errors=True)
        raise refusal from error
    try:
        sync(path.parent)
    except OSError as error:
        log.warning("checkpoint %s: whole, but may be lost with a power cut: %s", path, error)


def _check_here(partial: Path, parts: Sequence[Written]) -> None:
    """Raise OSError unless what all ranks have written is in the folder that this one sees."""
    for rank, part in enumerate(parts):
        for name, entry in part.files.items():
            size = (partial / name).stat().st_size if (partial / name).exists() else None
            if size != entry["bytes"]:
                raise OSError(
                    f"{name} of rank {rank} is not here: expected {entry['bytes']} bytes, got "
                    f"{'none' if size is None else size} (is the folder shared by all machines?)"
                )


def _unwritten(path: Path, error: Exception, needed_bytes: int) -> CheckpointError:
    cause = _of_the_system(error)
    remedy = room_at(path.parent, needed_bytes, cause)
    refusal = CheckpointError(
        f"checkpoint {path}: expected it to be written, got {said(cause or error)}; {remedy}"
    )
    refusal.__cause__ = error
    return refusal


def _of_the_system(error: BaseException | None) -> OSError | None:
    """Return the error of the operating system behind one of torch's, if that is the reason."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None
