"""Files of a checkpoint's folder, and remedies if it cannot be written or read."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from gpipe_hpc.checkpoint.manifest import MANIFEST, METADATA, Facts, read_manifest, read_part
from gpipe_hpc.checkpoint.metadata import StoredTensor, read_metadata
from gpipe_hpc.errors import CheckpointError, os_remedy

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

PARTIAL_SUFFIX: Final = ".partial"
OUTER: Final = "outer."  # prefix of the tensors of the outer optimizer (local SGD)
_OURS: Final = re.compile(rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|{re.escape(MANIFEST)}").fullmatch
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def read_facts(path: Path) -> Facts:
    """Read the manifest of a checkpoint; raise CheckpointError if there is no valid one."""
    try:
        return read_manifest(path)
    except (OSError, ValueError) as error:
        older = _newest_older(path)
        remedy = "correct the path" if older is None else other_checkpoint(path)
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            first = os_remedy(error)
            remedy = remedy if first is None else first if older is None else f"{first}; {remedy}"
        is_absent = isinstance(error, FileNotFoundError) and not os.path.exists(path)
        raise CheckpointError(
            f"checkpoint {path}: not a checkpoint written by gpipe_hpc: "
            f"{'no such folder' if is_absent else error}; {remedy}"
        ) from error


def read_owner(path: Path, key: str) -> str | None:
    """Return the run that wrote a checkpoint, complete or not; None if unknown.

    `key` is the key of the run's name in the extra values.
    """
    try:
        owner = read_part(path)["extra"][key]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return owner if isinstance(owner, str) else None


def is_ours(name: str) -> bool:
    """Return whether a file name is one that checkpoints use."""
    return _OURS(name) is not None


def has_files(path: Path) -> bool:
    """Return whether a folder contains files of a checkpoint, complete or not."""
    return any(is_ours(each.name) for each in path.iterdir())


def read_stored(path: Path) -> dict[str, StoredTensor]:
    """Return descriptions of a checkpoint's tensors by name; raise CheckpointError on failure."""
    try:
        return read_metadata(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: {path / METADATA} cannot be read: {error_text(error)}; "
            f"{os_remedy(error) or other_checkpoint(path)}"
        ) from error


def other_checkpoint(path: Path) -> str:
    """Return advice for messages about a damaged checkpoint: the newest older one, if any."""
    found = _newest_older(path)
    if found is None:
        return "check the disk, or load another checkpoint"
    return f"check the disk, or resume from an older one: checkpoint.resume={found}"


def _newest_older(path: Path) -> Path | None:
    """Return the newest older checkpoint next to `path` that appears complete.

    Only names, manifests and file sizes are checked.
    """
    path = path.absolute()
    own = steps_done(path, looks_whole=False)
    older: list[tuple[int, Path]] = []
    # Only names that differ in their number: not incomplete or renamed checkpoints.
    name = re.sub(r"\d+", "*", path.name)
    if not name:
        return None
    for folder in path.parent.glob(name):
        if folder == path or re.sub(r"\d+", "*", folder.name) != name:
            continue
        steps = steps_done(folder)
        if steps is not None and (own is None or steps < own):
            older.append((steps, folder))
    return max(older)[1] if older else None


def steps_done(path: Path, looks_whole: bool = True) -> int | None:
    """Return the step of a checkpoint; None if it has no manifest or a file's size is wrong.

    With `looks_whole` False, sizes are not checked.
    """
    try:
        facts = read_manifest(path)
        files = facts.get("files", {}) if looks_whole else {}
        sizes = {name: entry["bytes"] for name, entry in files.items()}
        if any((path / name).stat().st_size != size for name, size in sizes.items()):
            return None
        return int(facts["steps_done"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def space_remedy(folder: Path, needed_bytes: int, error: BaseException | None = None) -> str:
    """Return the remedy for a failed write, from its errno, or from free and needed disk space."""
    known = os_remedy(error)
    if known is not None and not (isinstance(error, OSError) and error.errno in _FULL):
        return known
    while not os.path.isdir(folder):
        folder = folder.parent
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:,.3f} MB"
    except OSError:
        free = "an unknown number of bytes"
    room = (
        f"its file system has {free} free and the checkpoint takes about "
        f"{needed_bytes / 1e6:,.3f} MB"
    )
    return f"{room}; {known or 'check the disk, or use another folder'}"


def sync(path: Path) -> None:
    """Sync a file, or a rename within a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def error_text(error: BaseException) -> str:
    """Return an error's class and text, or a default text if it has none."""
    empty = "truncated file" if isinstance(error, EOFError) else "no details"
    return f"{type(error).__name__}: {str(error) or empty}"


def model_tensors(pipe: "Pipeline") -> dict[str, Tensor]:
    """Return this rank's parameters and buffers as model.<global name>, after pending updates."""
    pipe.await_parameters()
    tensors: dict[str, Any] = {}
    for stage in pipe.stages.values():
        for name, parameter in stage.named_parameters().items():
            tensors[f"model.{name}"] = parameter.detach()
        for name, buffer in stage.named_buffers().items():
            tensors[f"model.{name}"] = buffer
    return tensors
