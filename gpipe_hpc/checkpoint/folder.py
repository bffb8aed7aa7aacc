"""What is in a checkpoint's folder, and what goes wrong when it is written or read."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from gpipe_hpc.comm.failure import lost
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

FACTS: Final = "gpipe_hpc.json"
PARTIAL_SUFFIX: Final = ".partial"
_NEEDED: Final = frozenset({"parameters", "values", "steps_done", "loss_weight", "extra"})


def read_facts(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself; CheckpointError if there is none at `path`."""
    try:
        facts = json.loads((path / FACTS).read_text())
        lacking = _NEEDED - facts.keys() if isinstance(facts, dict) else _NEEDED
        if lacking:
            raise ValueError(f"no {', '.join(sorted(lacking))} in {FACTS}")
    except (OSError, ValueError) as error:
        older = _newest_older(path)
        remedy = "look under run.dir/checkpoints" if older is None else other_checkpoint(path)
        raise CheckpointError(
            f"checkpoint {path}: expected a folder written by gpipe_hpc, got "
            f"{error if path.exists() else 'no such folder'}; {remedy}"
        ) from error
    return cast(dict[str, Any], facts)


def read_owner(path: Path, key: str) -> str | None:
    """Return what a checkpoint, whole or cut short, says in `extra` of who writes it, or None."""
    try:
        owner = json.loads((path / FACTS).read_text())["extra"][key]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return owner if isinstance(owner, str) else None


def read_metadata(path: Path) -> Metadata:
    """Return which tensors a checkpoint holds; CheckpointError if it cannot be read."""
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"checkpoint {path}: expected to read {path / '.metadata'}, got {_said(error)}; "
            f"{other_checkpoint(path)}"
        ) from error


def other_checkpoint(path: Path) -> str:
    """Return the remedy for a damaged checkpoint: the newest older one beside it, if any."""
    found = _newest_older(path)
    if found is None:
        return "look at the disk, or load another checkpoint"
    return f"look at the disk, or go on from an older one: checkpoint.resume={found}"


def _newest_older(path: Path) -> Path | None:
    path = path.absolute()
    own = _steps_done(path)
    older: list[tuple[int, Path]] = []
    # Of the same name but for its number: not one cut short or put away.
    name = re.sub(r"\d+", "*", path.name)
    if not name:
        return None
    for folder in path.parent.glob(name):
        if folder == path or re.sub(r"\d+", "*", folder.name) != name:
            continue
        steps = _steps_done(folder)
        if steps is not None and (own is None or steps < own) and _lists_tensors(folder):
            older.append((steps, folder))
    return max(older)[1] if older else None


def _steps_done(path: Path) -> int | None:
    try:
        return int(json.loads((path / FACTS).read_text())["steps_done"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lists_tensors(path: Path) -> bool:
    try:
        FileSystemReader(path).read_metadata()
    except Exception:  # a damaged pickle may raise anything
        return False
    return True


def room_at(folder: Path, needed_bytes: int) -> str:
    """Return the remedy for a failed write: how much room there is, and how much it takes."""
    while not folder.is_dir():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    return (
        f"its file system has {free_bytes / 1e6:,.3f} MB free and the checkpoint takes about "
        f"{needed_bytes / 1e6:,.3f} MB; look at the disk, or use another folder"
    )


def sync(path: Path) -> None:
    """Make a file, or a rename within a folder, last over a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def named(path: Path, what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Say in a line what torch's checkpointing tells in tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        whose = f" on rank {rank}" if what == "written" else ""
        raise CheckpointError(
            f"checkpoint {path}: expected it to be {what}, got {_said(cause)}{whose}; {remedy()}"
        ) from cause
    except RuntimeError as error:
        raise lost(error, "a rank at the checkpoint") from error


def _said(error: BaseException) -> str:
    """Return an error's kind and text; some have none."""
    empty = "a file ends too early" if isinstance(error, EOFError) else "it says no more"
    return f"{type(error).__name__}: {str(error) or empty}"


@contextmanager
def alone() -> Iterator[None]:
    """Let one rank read or write by itself: meant here, so torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def model_tensors(pipe: "Pipeline") -> dict[str, Any]:
    """Return this rank's parameters and buffers as model.<global name>."""
    tensors: dict[str, Any] = {}
    for stage in pipe.stages.values():
        for name, parameter in stage.named_parameters().items():
            tensors[f"model.{name}"] = parameter.detach()
        for name, buffer in stage.named_buffers().items():
            tensors[f"model.{name}"] = buffer
    return tensors
