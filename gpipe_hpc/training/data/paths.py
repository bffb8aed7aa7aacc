"""Files that settings name: paths, patterns and folders."""

import errno
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import DataError, MissingDataError, os_remedy


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
    number = error.errno if isinstance(error, OSError) else None
    own = _REMEDIES.get(number or 0) or os_remedy(error)
    remedy = own or "make it anew, look at the file system, or leave it out"
    return DataError(
        f"data: {path} cannot be read, expected a readable file, got {error}; {remedy}"
    )


_REMEDIES: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.EACCES: "correct its permissions or leave it out",
        errno.EPERM: "correct its permissions or leave it out",
        errno.ENOENT: "put it back, or start the run anew without it",
        errno.EMFILE: "let the process open more files (ulimit -n), or join small ones",
        errno.ENFILE: "the machine has too many files open: look for who opens them",
        errno.ENOMEM: "give the process more memory, or more maps (vm.max_map_count)",
        errno.ESTALE: "the file was replaced on its server: start the run anew",
        errno.EIO: "the disk or its server fails: look at the system's log",
    }
)
