"""A script's checkpoints in one folder, named by step: the newest, and which of them may go.

Newest is what was written last. A script that went back to step 50 writes 60 once more, and what an
earlier start had left at 80 is then the older one.
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
from gpipe_hpc.comm.collectives.group import Gathering
from gpipe_hpc.errors import CheckpointError, ConfigError

log = logging.getLogger("gpipe_hpc.checkpoint")

_NAME: Final = re.compile(r"step_\d{8,}")
_BEFORE: Final = f".before{PARTIAL_SUFFIX}"


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint; names sort by step."""
    return f"step_{step:08d}"


def latest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in `folder`; None if there is none.

    Complete according to its manifest and the sizes of its files; loading verifies every byte.
    """
    for path in reversed(_by_age(Path(folder))):
        if steps_done(path) is not None:
            return path
    return None


def save_numbered(
    folder: Path,
    step: int,
    keep: int | None,
    group: Gathering,
    *,
    leads: bool,
    save: Callable[[Path], Path],
) -> Path:
    """Save the checkpoint of a step in `folder` by `save`, and remove old ones.

    All ranks call it; one of them `leads`. A checkpoint of the same step is replaced once the new
    one is complete, and restored if that fails. All but the newest `keep` are removed; None keeps
    all. Raises ConfigError for an invalid step or number, and what `save` raises.
    """
    number, num_kept = _whole(step), None if keep is None else _whole(keep)
    if number is None or number < 0 or (keep is not None and (num_kept is None or num_kept < 1)):
        raise ConfigError(
            f"save: bad step or keep, expected a whole number of 0 or more for the step and of 1 "
            f"or more to keep, got step={step!r} and keep={keep!r}; correct them, as "
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
    """Return a whole number, of NumPy's or torch's too; None for anything else."""
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        return None
    try:
        return index(number)
    except TypeError:  # a tensor of something else
        return None


def _by_age(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the one that was written last at the end."""
    found: list[tuple[int, str, Path]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(folder):
            path = Path(entry.path)
            # One without a manifest is no checkpoint, or was cut short.
            with contextlib.suppress(OSError):
                if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    found.append(((path / MANIFEST).stat().st_mtime_ns, entry.name, path))
    return [path for _, _, path in sorted(found)]


def _put_aside(path: Path, before: Path) -> None:
    """Free the name of a checkpoint; CheckpointError if something else has it."""
    if not os.path.lexists(path):
        return
    strange = [name for name in _names(path) if not is_ours(name)]
    if strange:
        raise CheckpointError(
            f"checkpoint {path}: expected at most an earlier checkpoint of this step there, got "
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
    """Remove a checkpoint, under another name first: a kill must not leave half of it."""
    try:
        if path.exists():
            aside = path.with_name(path.name.removesuffix(_BEFORE) + f".removed{PARTIAL_SUFFIX}")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(path.rename(aside))
    except OSError as error:
        log.warning("checkpoint %s: expected to remove it, got %s; look at it", path, error)
