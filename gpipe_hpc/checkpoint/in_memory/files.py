"""Files of in-memory checkpoints on one host, in a folder private to the user and the run.

A *copy* is a file with the state of one rank at one step.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple

import torch

from gpipe_hpc.checkpoint.rank_state import LENGTH_BYTES, StateError, read_about
from gpipe_hpc.errors import ConfigError, os_remedy
from gpipe_hpc.small_files import read_text
from gpipe_hpc.trainer.run.lock import LockOwner, is_here, lives, myself, read_owner

log = logging.getLogger("gpipe_hpc.train")

DEFAULT_FOLDER: Final = Path("/dev/shm")
NO_STARTS: Final[Mapping[str, int]] = MappingProxyType({})
FORGOTTEN_S: Final = 3600.0
"""Seconds for which the copies of a dead run of the same user are kept for a restart."""
START: Final = "start"
"""Key, in the description of a copy, of the start of the run that wrote it."""
_NAME: Final = re.compile(r"rank(\d{5,})_step(\d{8,})")
_PART: Final = ".part"
_OWNERS: Final = "owner_"
_HERE: Final = "here_"
_NEED: Final = "need_"
_TRIES: Final = 100  # attempts to create a folder that other processes remove
_MOST_HEADER_BYTES: Final = 2**30


class Generation(NamedTuple):
    """Identifies copies of the same step that were written by the same start of the run.

    Another start may have reached the same step in another layout, in which sums are computed in
    another order.
    """

    step: int
    start: str


class StoredCopy(NamedTuple):
    """A copy on this host: a file with the state of a rank at a step, and its description."""

    path: Path
    rank: int
    step: int
    about: dict[str, Any]

    @property
    def generation(self) -> "Generation":
        """Return the generation that the copy belongs to."""
        return Generation(self.step, _start(self))


def _start(copy: StoredCopy) -> str:
    return str(copy.about.get(START, ""))


class CopyFolder:
    """The folder with the in-memory checkpoint files (copies) of one run on this host."""

    def __init__(self, root: Path, run_name: str, starts: Mapping[str, int] = NO_STARTS) -> None:
        """Create the object without the folder.

        `starts` maps each earlier start to the step from which a later one resumed.
        """
        self._user = root / f"gpipe_hpc_{os.getuid()}"
        self.path = self._user / run_name
        self._starts = starts

    def open(self, start: str = "", rank: int = 0) -> None:
        """Create the folder with private permissions, and register this process under its rank.

        `start` is a text unique to this start of the run. Raises ConfigError if the folder cannot
        be created, or if it belongs to another user.
        """
        try:
            for left in reversed(range(_TRIES)):
                try:
                    self._make(f"{_HERE}{start}_{rank}")
                    return
                except FileNotFoundError:  # another ending process has just removed the folder
                    if not left:
                        raise
        except OSError as error:
            raise ConfigError(self._unwritable(error)) from error

    def _make(self, note: str) -> None:
        for folder in (self._user, self.path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700, parents=folder == self._user)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to another user")
            folder.chmod(0o700)
        # First of all: this note keeps other processes from removing the folder.
        (self.path / note).touch()
        owner = json.dumps(myself()._asdict())
        (self.path / f"{_OWNERS}{os.getpid()}").write_text(owner)

    def entered(self, start: str) -> tuple[int, ...]:
        """Return the ranks registered for a start of the run, and remove registrations of others.

        Call it after all ranks have registered. A rank that is missing must call `open` again: an
        earlier start, which was still ending, has removed its registration.
        """
        ranks = []
        for path, its_start, rank in _notes(self._paths()):
            if its_start == start:
                ranks.append(rank)
            else:
                path.unlink(missing_ok=True)
        return tuple(sorted(ranks))

    def _paths(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except FileNotFoundError:  # another rank of this host has removed it
            return []

    def publish_need(self, rank: int, num_bytes: int) -> str | None:
        """Publish the number of bytes that a rank will write; return an error message or None."""
        try:
            (self.path / f"{_NEED}{rank}").write_text(str(num_bytes))
        except OSError as error:
            return self._unwritable(error)
        return None

    def _unwritable(self, error: OSError) -> str:
        return (
            f"config: bad checkpoint.neighbour_dir: {self.path} is not a writable memory-backed "
            f"folder ({error}); {os_remedy(error) or 'check its permissions'}, or choose another "
            f"folder"
        )

    def needed_bytes(self, ranks: Sequence[int]) -> int:
        """Return the sum of the bytes that ranks have published; a missing number counts as 0."""
        total = 0
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError):
                total += int(read_text(self.path / f"{_NEED}{rank}"))
        return total

    def all(self) -> list[StoredCopy]:
        """Return the readable copies of this run on this host.

        Copies that an earlier start wrote after the step from which a later start resumed are left
        out.
        """
        found = []
        with contextlib.suppress(OSError):
            for path in sorted(self.path.iterdir()):
                form = _NAME.fullmatch(path.name)
                with contextlib.suppress(OSError, StateError):
                    if form is not None and _is_private(path):
                        rank, step = map(int, form.groups())
                        found.append(StoredCopy(path, rank, step, _about(path)))
        return [copy for copy in found if copy.step <= self._starts.get(_start(copy), copy.step)]

    def writing(self, rank: int, step: int) -> "CopyWriter":
        """Return a writer for the copy of a rank's state at a step."""
        return CopyWriter(self.path / f"rank{rank:05d}_step{step:08d}")

    def keep(self, steps: set[int]) -> None:
        """Remove the copies of all steps except `steps`, and incomplete copies."""
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                form = _NAME.fullmatch(path.name.removesuffix(_PART))
                is_part = path.name.endswith(_PART)
                if form is not None and (is_part or int(form.group(2)) not in steps):
                    path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return the free bytes of the file system that contains the copies."""
        return shutil.disk_usage(self.path).free

    def remove(self, start: str = "") -> None:
        """Remove all copies of the run on this host at the end of the given start.

        If a later start has already opened the folder, nothing is removed.
        """
        paths = self._paths()
        if all(its_start == start for _, its_start, _ in _notes(paths)):
            _remove(self.path, paths)
        with contextlib.suppress(OSError):
            self._user.rmdir()  # if no other run of this user has copies

    def clear_forgotten(self) -> None:
        """Remove old copies of this user's dead runs; warn about recent ones."""
        with contextlib.suppress(OSError):
            for folder in self._user.iterdir():
                if folder == self.path or not folder.is_dir() or folder.is_symlink():
                    continue
                paths = list(folder.iterdir())
                if any(not is_here(owner) or lives(owner) for owner in _owners(folder)):
                    continue
                age_s = time.time() - max(path.stat().st_mtime for path in [folder, *paths])
                if age_s > FORGOTTEN_S:
                    _remove(folder, paths)
                    log.info("removed %s: in-memory checkpoints of a dead run", folder)
                else:
                    log.warning(
                        "%s contains copies of a run that ended %.0f s ago; if you will not "
                        "restart that run, remove the folder (later runs remove it after %.0f s)",
                        folder,
                        age_s,
                        FORGOTTEN_S,
                    )


class CopyWriter:
    """Writer of an in-memory checkpoint file, renamed when it is complete.

    `failure` stores the first error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(path.name + _PART)
        self._file: BinaryIO | None = None
        self.failure: OSError | None = None
        with self._noting():
            self._part.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._file = os.fdopen(os.open(self._part, flags, 0o600), "wb", buffering=0)

    def write(self, piece: torch.Tensor) -> None:
        """Append bytes, unless an earlier operation failed."""
        with self._noting():
            if self._file is not None and self.failure is None:
                rest = piece.numpy().data
                while len(rest):
                    rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Rename the complete copy to its final name; remove it if an operation failed."""
        with self._noting():
            if self._file is not None:
                self._file.close()
            if self.failure is None:
                self._part.rename(self._path)
        if self.failure is not None:
            self._part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error


def read_copy(path: Path) -> torch.Tensor:
    """Read an in-memory checkpoint file into a uint8 tensor; raise OSError on failure."""
    size = path.stat().st_size
    memory = torch.empty(size, dtype=torch.uint8)
    view = memory.numpy().data
    done = 0
    with path.open("rb", buffering=0) as file:
        while done < size and (count := file.readinto(view[done:])):
            done += count
    return memory[:done]


def _about(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > _MOST_HEADER_BYTES:
            raise StateError(f"a header of {length} bytes")
        return read_about(file.read(length))


def _is_private(path: Path) -> bool:
    found = path.lstat()
    is_file = stat.S_ISREG(found.st_mode)
    return is_file and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _notes(paths: Iterable[Path]) -> Iterator[tuple[Path, str, int]]:
    """Yield the files by which ranks have registered: path, start of the run, and rank."""
    for path in paths:
        if path.name.startswith(_HERE):
            start, _, rank = path.name.removeprefix(_HERE).rpartition("_")
            if rank.isdecimal():
                yield path, start, int(rank)


def _remove(folder: Path, paths: Iterable[Path]) -> None:
    """Remove the given files, and then the folder if it contains no new ones."""
    with contextlib.suppress(OSError):  # another rank has removed it, or it is not empty
        for path in paths:
            path.unlink(missing_ok=True)
        folder.rmdir()


def _owners(folder: Path) -> Iterator[LockOwner]:
    for path in folder.glob(f"{_OWNERS}*"):
        with contextlib.suppress(OSError, ValueError):
            yield read_owner(path)
