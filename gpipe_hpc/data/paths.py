"""Files that settings name: paths, patterns and folders."""

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

# What a wrong path gives, other than what a disk or a network do.
_MISTAKES: Final = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP),
        *(errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO),
    }
)


def expand(patterns: Sequence[str], folder_suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files that paths and patterns name, each pattern's in order of their names.

    `folder_suffixes`: a folder stands for its files that end so; with none, folders are not taken.
    Raises MissingDataError for a pattern without files.
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
                f"data: no such file, expected files{inside} at {pattern!r}, got none in "
                f"{Path.cwd()}; correct data.paths or data.validation_paths"
            )
        paths.extend(sorted(files))
    return paths


def folder(setting: str, path: str | Path, remedy: str = "correct it") -> Path:
    """Return a folder that is there; raise MissingDataError that names setting and remedy."""
    found = Path(path).expanduser()
    if not found.is_dir():
        raise MissingDataError(
            f"data: {setting} is no folder, expected one with the data, got {str(found)!r} in "
            f"{Path.cwd()}; {remedy}"
        )
    return found


def unreadable(path: Path, error: Exception) -> DataError:
    """Return the error for a file that the system does not let us read."""
    remedy = os_remedy(error) or "make it anew, look at the file system, or leave it out"
    is_mistaken = isinstance(error, OSError) and error.errno in _MISTAKES
    kind = MissingDataError if is_mistaken else DataError
    return kind(f"data: {path} cannot be read, expected a readable file, got {error}; {remedy}")


def refuse_shrunk(array: npt.NDArray[Any]) -> None:
    """Raise DataError if an array lies in a map of a file that was cut short since.

    To be called before each reading, as the system ends a process that reads behind the end of a
    mapped file (SIGBUS). It costs about a microsecond. Other arrays are fine.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        array, base = base, base.base
    if not isinstance(base, mmap.mmap) or not isinstance(array, np.memmap):
        return
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    refuse_short(Path(str(array.filename)), start + len(base), base.size())


def refuse_short(path: Path, expected: int, found: int) -> None:
    """Raise DataError for a file that has fewer bytes than when it was opened."""
    if found < expected:
        raise DataError(
            f"data: {path} was cut short while it was read, expected {expected} bytes as before, "
            f"got {found}; keep data files as they are while a run reads them"
        )
