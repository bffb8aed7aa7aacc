"""Expansion of paths and patterns in settings, and errors of unreadable or truncated files."""

import errno
import glob
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpipe_hpc.errors import DataError, MissingDataError, os_remedy

# Errors caused by a wrong path, not by a disk or network failure.
_MISTAKES: Final = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP),
        *(errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO),
    }
)


def expand(patterns: Sequence[str], folder_suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files matching paths and patterns, the matches of each pattern sorted by name.

    Args:
        patterns: paths or glob patterns.
        folder_suffixes: suffixes of the files to take from a matching folder; if empty, folders are
            ignored.

    Raises:
        MissingDataError: if a pattern matches no file.
    """
    paths: list[Path] = []
    for pattern in patterns:
        found = [Path(each) for each in glob.glob(os.path.expanduser(pattern), recursive=True)]
        files = [each for each in found if not each.is_dir()]
        folders = [each for each in found if each.is_dir()]
        for suffix in folder_suffixes:
            files += [file for each in folders for file in each.glob(f"*{suffix}")]
        if not files:
            suffixes = " or ".join(folder_suffixes)
            inside = f" or {suffixes} files in a folder" if suffixes else ""
            raise MissingDataError(
                f"data: no files{inside} match {pattern!r} (working folder {Path.cwd()}); "
                f"correct data.paths or data.validation_paths"
            )
        paths.extend(sorted(files))
    return paths


def folder(setting: str, path: str | Path, remedy: str = "correct it") -> Path:
    """Return an existing folder; raise MissingDataError with the setting and a remedy otherwise."""
    found = Path(path).expanduser()
    if not found.is_dir():
        raise MissingDataError(
            f"data: {setting}: {str(found)!r} is not a folder (working folder {Path.cwd()}); "
            f"{remedy}"
        )
    return found


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read because of `error`."""
    remedy = os_remedy(error) or "create it again, check the file system, or remove it from data"
    is_mistaken = isinstance(error, OSError) and error.errno in _MISTAKES
    kind = MissingDataError if is_mistaken else DataError
    return kind(f"data: {path} cannot be read: {error}; {remedy}")


def refuse_shrunk(array: npt.NDArray[Any]) -> None:
    """Raise DataError if a memory-mapped file has been truncated since the array was mapped.

    Call this before each read: reading beyond the end of a mapped file kills the process (SIGBUS).
    It takes about a microsecond. Arrays that are not memory-mapped are accepted.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        array, base = base, base.base
    if not isinstance(base, mmap.mmap) or not isinstance(array, np.memmap):
        return
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    refuse_short(Path(str(array.filename)), start + len(base), base.size())


def refuse_short(path: Path, expected: int, found: int) -> None:
    """Raise DataError if a file has fewer bytes than when it was opened."""
    if found < expected:
        raise DataError(
            f"data: {path} was truncated from {expected} to {found} bytes while a run reads it; "
            f"do not modify data files during a run"
        )
