"""The run folder: its default name, and the checkpoints in it."""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_hpc.checkpoint import (
    PARTIAL_SUFFIX,
    has_files,
    is_manifest_as_written,
    read_facts,
    read_owner,
    step_name,
)
from gpipe_hpc.errors import CheckpointError, ConfigError
from gpipe_hpc.trainer.run.identity import read_run, run_id

log = logging.getLogger("gpipe_hpc.train")

REQUEUE_FILE = "REQUEUE"
NON_FINITE_FILE: Final = "NON_FINITE"
OWNER: Final = "run"
"""Key, in a checkpoint's extra values, of the run that wrote it."""
LAUNCHERS: Final = "launchers"
"""Key, in `run.json`, of the launchers of the newest start's processes."""
_PREFIX = "step_"
_ABANDONED = "abandoned_"
_FIRST_SPECIAL_STEP: Final = 2**32 - 16  # Slurm's step ids of the batch script and the like
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def default_run_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return runs/<name>, which is the same for each restart of a run.

    Restarted workers of torchrun and requeued jobs of Slurm must find their checkpoints. The name
    therefore comes from the job, or from the start time and process id of the launcher, which
    distinguishes runs that start in the same second.
    """
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" in env:
        # An allocation may run several commands with srun; after a requeue they count from 0.
        step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
        suffix = f"_{step}" if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP else ""
        return Path("runs") / f"slurm_{env['SLURM_JOB_ID']}{suffix}"
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid()
    moment = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(_start_s(launcher)))
    return Path("runs") / f"{moment}_{launcher}"


def _start_s(pid: int) -> float | None:
    """Return a process's start time in seconds since the epoch; None if /proc is not available."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lines = Path("/proc/stat").read_text().splitlines()
        (booted_s,) = (int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, ValueError, IndexError):
        return None
    return booted_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Restart(NamedTuple):
    """Evidence that a run is a restart of the previous run in its folder."""

    by_launcher: bool  # a launcher repeats the same command
    has_mark: bool  # the previous run left its requeue mark


def find_restart(
    folder: Path,
    environ: Mapping[str, str] | None = None,
    launchers: Set[str] = frozenset(),
) -> Restart:
    """Detect whether a launcher or the run's requeue mark indicates a restart.

    A launcher is recognized by its restart count in environment variables, or because one of
    `launchers` (those of all ranks) also started the previous run.
    """
    env = os.environ if environ is None else environ
    counts = (env.get(name, "0") for name in _RESTART_COUNTS)
    before = read_run(folder).get(LAUNCHERS)
    is_known = isinstance(before, list) and not launchers.isdisjoint(before)
    is_counted = any(count != "0" for count in counts)
    return Restart(is_counted or is_known, (folder / REQUEUE_FILE).exists())


class Checkpoints:
    """Checkpoints in a run folder, named by step.

    A checkpoint of the run is a folder (not a link) with the exact name of its step, whose manifest
    has the same step and the run's name. A checkpoint of an older version names no run: it can be
    loaded but is never removed. Other files are not read, renamed or removed.

    Args:
        run_folder: the run folder.
        keep: number of newest checkpoints that `prune` keeps.
    """

    def __init__(self, run_folder: Path, keep: int) -> None:
        self._run_folder = run_folder
        self._folder = run_folder / "checkpoints"
        self._keep = keep

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self._folder / step_name(step)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; None if there is none."""
        name = run_id(self._run_folder)
        return next((p for p in reversed(self._named()) if _may_be_of(name, p)), None)

    def prune(self) -> None:
        """Remove the run's incomplete checkpoints, and its complete ones except the newest `keep`.

        Checkpoints renamed by `set_aside` are counted separately. Errors are logged as warnings.
        """
        name = run_id(self._run_folder)
        if name is None:
            return
        own = [path for path in self._named() if _is_of(name, path)]
        aside = [path for path in self._abandoned() if _is_of(name, path)]
        aside.sort(key=lambda path: path.stat().st_mtime)
        for path in [*own[: -self._keep], *aside[: -self._keep]]:
            with _warn_on_error(path):
                # Rename first: a kill must not leave a damaged checkpoint with this name.
                _remove(path.rename(path.with_name(path.name + PARTIAL_SUFFIX)))
        for path in self._incomplete():
            if _is_empty(path) or read_owner(path, OWNER) == name:
                with _warn_on_error(path):
                    _remove(path)

    def set_aside(self, resumed: Path | None) -> list[Path]:
        """Rename checkpoints of earlier starts past the step that this start resumes from.

        This start will write these steps again, and a later start must not resume from the old
        ones. Raises ConfigError if one of them does not belong to this run.
        """
        first = 0 if resumed is None else read_facts(resumed)["steps_done"]
        kept = None if resumed is None else resumed.resolve()
        name = run_id(self._run_folder)
        stale = []
        for path in self._existing_from(first):
            is_start = resumed is not None and path == resumed.absolute()
            if is_start or (path.resolve() == kept and not path.is_symlink()):
                continue
            if path.is_symlink() or not path.is_dir() or not _could_be_of(name, path):
                raise ConfigError(
                    f"config: {path} does not belong to the run in {self._run_folder}, which "
                    f"would save there after step {first}; to resume from it set "
                    f"checkpoint.resume={path}, otherwise move it away"
                )
            stale.append(path)
        self._refuse_partials(first, name)
        return [self._abandon(path) for path in stale]

    def _refuse_partials(self, first: int, name: str | None) -> None:
        """Raise ConfigError if another run's incomplete checkpoint occupies a needed name."""
        for path in self._incomplete():
            if not path.name.startswith(_PREFIX) or _could_be_of(name, path):
                continue
            if _step(path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))) >= first:
                raise ConfigError(
                    f"config: {path} belongs to another run than {self._run_folder}, which would "
                    f"save there after step {first}; move it away"
                )

    def candidates(self, resume: str, is_restart: bool = False) -> list[Path]:
        """Return the checkpoints that `checkpoint.resume` selects, newest first, damaged or not.

        Args:
            resume: auto, never, or the path of a checkpoint or of a run folder.
            is_restart: whether a launcher repeats its command; then the run's own checkpoints take
                precedence.

        Raises:
            ConfigError: if the path does not exist or is not a checkpoint.
            CheckpointError: if it cannot be read.
        """
        own = self._newest_first()
        if resume == "auto" or (is_restart and own):
            return own
        if resume == "never":
            return []
        path = Path(resume)
        others = Checkpoints(path, self._keep)._newest_first()
        if others:
            return others
        if not path.is_dir():
            raise ConfigError(
                f"config: bad checkpoint.resume: {path} does not exist; expected auto, never, or "
                f"the path of a checkpoint or a run folder"
            )
        try:
            read_facts(path)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | ValueError):
                raise ConfigError(
                    f"config: bad checkpoint.resume: {resume!r} is neither a checkpoint nor a run "
                    f"folder: {error}"
                ) from error
            raise
        return [path]

    def _newest_first(self) -> list[Path]:
        name = run_id(self._run_folder)
        return [p for p in reversed(self._named()) if _may_be_of(name, p) or _is_damaged(name, p)]

    def _named(self) -> list[Path]:
        """Return the folders with the name of a checkpoint, sorted by step."""
        return sorted(self._matching(_PREFIX, ""), key=_step)

    def _abandoned(self) -> list[Path]:
        return sorted(self._matching(_ABANDONED + _PREFIX, r"(\.\d+)?"))

    def _incomplete(self) -> list[Path]:
        partial = re.escape(PARTIAL_SUFFIX)
        found = self._matching(f"({_ABANDONED})?{_PREFIX}", rf"(\.\d+)?{partial}")
        return sorted(found)

    def _matching(self, before: str, behind: str) -> Iterator[Path]:
        form = re.compile(rf"{before}(\d{{8,}}){behind}")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self._folder):
                if form.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)

    def _existing_from(self, first: int) -> list[Path]:
        """Return all files and folders named as checkpoints of steps from `first` on."""
        form = re.compile(rf"{_PREFIX}\d{{8,}}")
        found = (p for p in self._folder.glob(f"{_PREFIX}*") if form.fullmatch(p.name))
        return sorted((path for path in found if _step(path) >= first), key=_step)

    def _abandon(self, path: Path) -> Path:
        aside = path.with_name(_ABANDONED + path.name)
        name = run_id(self._run_folder)
        if aside.is_dir() and not aside.is_symlink() and name and _is_of(name, aside):
            _remove(aside)
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{_ABANDONED}{path.name}.{number}")
        path.rename(aside)
        os.utime(aside)  # records when it was abandoned
        return aside


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _may_be_of(name: str | None, path: Path) -> bool:
    """Return whether a complete checkpoint belongs to the run `name` or does not name its run."""
    try:
        facts = read_facts(path)
    except CheckpointError:
        return False
    owner = facts["extra"].get(OWNER)
    return facts["steps_done"] == _step(path) and (None in (name, owner) or owner == name)


def _is_damaged(name: str | None, path: Path) -> bool:
    """Return whether a folder is an unreadable checkpoint that may belong to the run `name`."""
    try:
        read_facts(path)
    except CheckpointError:
        return has_files(path) and _could_be_of(name, path)
    return False


def _could_be_of(name: str | None, path: Path) -> bool:
    """Return whether a checkpoint, complete or damaged, is not known to belong to another run.

    The run name in a manifest with a wrong digest is not trusted.
    """
    owner = read_owner(path, OWNER)
    return None in (name, owner) or owner == name or not is_manifest_as_written(path)


def _is_of(name: str, path: Path) -> bool:
    return read_owner(path, OWNER) == name


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir())


def _remove(path: Path) -> None:
    shutil.rmtree(path)


@contextlib.contextmanager
def _warn_on_error(path: Path) -> Iterator[None]:
    """Context manager that logs an error of removing a checkpoint instead of ending the run."""
    try:
        yield
    except OSError as error:
        log.warning("checkpoint %s: cannot be removed: %s", path, error)
