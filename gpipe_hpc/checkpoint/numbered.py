"""Checkpoints of a script in one folder, named by step: find the newest, remove old ones.

The newest checkpoint is the one written last. If a script returns to step 50 and writes step 60
again, a checkpoint of step 80 from an earlier start counts as older.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from operator import index
from pathlib import Path
from typing import Final, SupportsIndex

from gpipe_hpc.checkpoint.agreement import all_or_none
from gpipe_hpc.checkpoint.folder import PARTIAL_SUFFIX, is_ours, steps_done
from gpipe_hpc.checkpoint.manifest import MANIFEST
from gpipe_hpc.comm.collectives.group import ControlGroup
from gpipe_hpc.errors import CheckpointError, ConfigError

log = logging.getLogger("gpipe_hpc.checkpoint")

_NAME: Final = re.compile(r"step_\d{8,}")
_BEFORE: Final = f".before{PARTIAL_SUFFIX}"


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint, such as step_00000060."""
    return f"step_{step:08d}"


def latest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`; None if there is none.

    A checkpoint is complete if its manifest and file sizes are right; loading verifies every byte.
    """
    for path in reversed(_by_age(Path(folder))):
        if steps_done(path) is not None:
            return path
    return None


def save_numbered(
    folder: Path,
    step: int,
    keep: int | None,
    group: ControlGroup,
    *,
    leads: bool,
    save: Callable[[Path], Path],
) -> Path:
    """Save the checkpoint of a step in `folder` and remove old ones. Collective.

    An existing checkpoint of the same step is replaced when the new one is complete, and restored
    if saving fails.

    Args:
        folder: the folder.
        step: the step, an integer of at least 0.
        keep: number of newest checkpoints to keep; None keeps all.
        group: all ranks.
        leads: whether this rank manages the folder; True on one rank.
        save: writes a checkpoint to a path.

    Raises:
        ConfigError: if step or keep is invalid; errors of `save` propagate.
    """
    number, num_kept = _whole(step), None if keep is None else _whole(keep)
    if number is None or number < 0 or (keep is not None and (num_kept is None or num_kept < 1)):
        raise ConfigError(
            f"save: bad step or keep: step must be an integer of at least 0 and keep an integer of "
            f"at least 1, got step={step!r} and keep={keep!r}; correct them, for example "
            f"step=pipe.steps_done"
        )
    path = folder.absolute() / step_name(number)
    before = path.with_name(path.name + _BEFORE)
    all_or_none(group, lambda: _put_aside(path, before) if leads else None)
    try:
        saved = save(path)
    except BaseException:
        if leads and before.exists() and not path.exists():
            before.rename(path)
        raise
    if leads:
        doomed = [] if num_kept is None else _by_age(path.parent)[:-num_kept]
        for each in [before, *doomed]:
            _remove(each)
    return saved


def _whole(number: object) -> int | None:
    """Convert an integer of Python, NumPy or torch to int; return None for anything else."""
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        return None
    try:
        return index(number)
    except TypeError:  # a tensor that is not an integer scalar
        return None


def _by_age(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by time of writing, the newest last."""
    found: list[tuple[int, str, Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            path = Path(entry.path)
            # Without a manifest it is not a checkpoint, or incomplete.
            with contextlib.suppress(OSError):
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    found.append(((path / MANIFEST).stat().st_mtime_ns, entry.name, path))
    return [path for _, _, path in sorted(found)]


def _put_aside(path: Path, before: Path) -> None:
    """Rename an earlier checkpoint of the step; raise CheckpointError if it is something else."""
    if not os.path.lexists(path):
        return
    strange = [name for name in _names(path) if not is_ours(name)]
    if strange:
        raise CheckpointError(
            f"checkpoint {path} exists and is not an earlier checkpoint of this step: it contains "
            f"{strange[0]}; move it away, or save in another folder"
        )
    _remove(before)
    path.rename(before)


def _names(path: Path) -> Iterator[str]:
    if path.is_symlink() or not path.is_dir():
        yield "a file or link"
    else:
        yield from (each.name for each in path.iterdir())


def _remove(path: Path) -> None:
    """Remove a checkpoint, after renaming it, so that a kill cannot leave a damaged one."""
    try:
        if path.exists():
            aside = path.with_name(path.name.removesuffix(_BEFORE) + f".removed{PARTIAL_SUFFIX}")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(path.rename(aside))
    except OSError as error:
        log.warning("checkpoint %s cannot be removed: %s; remove it manually", path, error)
