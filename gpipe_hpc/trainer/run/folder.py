"""Where a run writes: one folder, decided once, and its checkpoints."""

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
"""The name, among what a checkpoint keeps for its run, of the run that wrote it."""
LAUNCHERS: Final = "launchers"
"""The name, in `run.json`, of who has started the processes of the newest start."""
_PREFIX = "step_"
_ABANDONED = "abandoned_"
_FIRST_SPECIAL_STEP: Final = 2**32 - 16  # Slurm's numbers of its batch script and the like
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def default_run_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return runs/<name>, the same name when a launcher starts this run again.

    A restarted worker of torchrun and a requeued job of Slurm must find what they had saved, so
    the name comes from the job, or from the launcher: when it was started, and its process number,
    which keeps apart runs that start in the same second.
    """
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" in env:
        # An allocation may run several commands, by srun; a requeued one counts them anew.
        step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
        suffix = f"_{step}" if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP else ""
        return Path("runs") / f"slurm_{env['SLURM_JOB_ID']}{suffix}"
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid()
    moment = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(_start_s(launcher)))
    return Path("runs") / f"{moment}_{launcher}"


def _start_s(pid: int) -> float | None:
    """Return when a process was started; None, which means now, where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        lines = Path("/proc/stat").read_text().splitlines()
        (booted_s,) = (int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, ValueError, IndexError):
        return None
    return booted_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Restart(NamedTuple):
    """Why a run may be the one that was in its folder before."""

    by_launcher: bool  # which repeats the command word by word
    has_mark: bool  # the run left its requeue mark


def find_restart(
    folder: Path,
    environ: Mapping[str, str] | None = None,
    launchers: Set[str] = frozenset(),
) -> Restart:
    """Say whether a launcher, or the run's own requeue mark, has started an earlier run again.

    A launcher counts its restarts; `launchers`, of all ranks, may have started the run before.
    """
    env = os.environ if environ is None else environ
    counts = (env.get(name, "0") for name in _RESTART_COUNTS)
    before = read_run(folder).get(LAUNCHERS)
    is_known = isinstance(before, list) and not launchers.isdisjoint(before)
    is_counted = any(count != "0" for count in counts)
    return Restart(is_counted or is_known, (folder / REQUEUE_FILE).exists())


class Checkpoints:
    """The checkpoints of a run folder, by step; the newest `keep` stay.

    A checkpoint of the run is a folder (no link) with exactly the name of its step, whose content
    says the same step and names the run. What an older version wrote names no run: it is read as
    the run's, but not removed. Nothing else is read, renamed or removed.
    """

    def __init__(self, run_folder: Path, keep: int) -> None:
        self._run_folder = run_folder
        self._folder = run_folder / "checkpoints"
        self._keep = keep

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step belongs."""
        return self._folder / step_name(step)

    def all(self) -> list[Path]:
        """Return the whole checkpoints, oldest first; what a kill cut short is not among them."""
        name = run_id(self._run_folder)
        return [path for path in self._named() if _may_be_of(name, path)]

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        name = run_id(self._run_folder)
        return next((p for p in reversed(self._named()) if _may_be_of(name, p)), None)

    def prune(self) -> None:
        """Remove the run's own except for the newest `keep`, of those abandoned too, and cut ones.

        What cannot be removed is told, and stays.
        """
        name = run_id(self._run_folder)
        if name is None:
            return
        own = [path for path in self._named() if _is_of(name, path)]
        aside = [path for path in self._abandoned() if _is_of(name, path)]
        aside.sort(key=lambda path: path.stat().st_mtime)
        for path in [*own[: -self._keep], *aside[: -self._keep]]:
            with _told(path):
                # Under another name first: a kill must not leave half of it under this one.
                _remove(path.rename(path.with_name(path.name + PARTIAL_SUFFIX)))
        for path in self._cut_short():
            if _is_empty(path) or read_owner(path, OWNER) == name:
                with _told(path):
                    _remove(path)

    def set_aside(self, resumed: Path | None) -> list[Path]:
        """Rename what an earlier start of the run saved past the step that this one starts from.

        This start will write those steps anew, and a later one must not take the old for newest.
        ConfigError if what stands in the way is not the run's.
        """
        first = 0 if resumed is None else read_facts(resumed)["steps_done"]
        kept = None if resumed is None else resumed.resolve()
        name = run_id(self._run_folder)
        stale = []
        for path in self._in_the_way(first):
            is_start = resumed is not None and path == resumed.absolute()
            if is_start or (path.resolve() == kept and not path.is_symlink()):
                continue
            if path.is_symlink() or not path.is_dir() or not _could_be_of(name, path):
                raise ConfigError(
                    f"config: {path} does not belong to the run in {self._run_folder}, and this "
                    f"start, after step {first}, will save there; to resume from it set "
                    f"checkpoint.resume={path}, otherwise move it away"
                )
            stale.append(path)
        self._refuse_partials(first, name)
        return [self._abandon(path) for path in stale]

    def _refuse_partials(self, first: int, name: str | None) -> None:
        """Refuse to save where another run's cut-short checkpoint would have to go."""
        for path in self._cut_short():
            if not path.name.startswith(_PREFIX) or _could_be_of(name, path):
                continue
            if _step(path.with_name(path.name.removesuffix(PARTIAL_SUFFIX))) >= first:
                raise ConfigError(
                    f"config: {path} belongs to another run than {self._run_folder}, and this "
                    f"start, after step {first}, will save there; move it away"
                )

    def candidates(self, resume: str, is_restart: bool = False) -> list[Path]:
        """Return what `checkpoint.resume` asks for, best first: auto, never, or a path.

        A path may be a checkpoint or a run folder, whose newest is best. `is_restart`: the
        launcher repeats its command, so the run goes on from what it saved itself, if anything.
        Damaged ones are among them. ConfigError if nothing is there, or no checkpoint;
        CheckpointError if it cannot be read.
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
                f"config: bad checkpoint.resume, expected a checkpoint or a run folder, got "
                f"{path}, which is not there; use auto, never or the path of one"
            )
        try:
            read_facts(path)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | ValueError):
                raise ConfigError(
                    f"config: bad checkpoint.resume, expected a checkpoint or a run folder, got "
                    f"{resume!r}: {error}"
                ) from error
            raise
        return [path]

    def _newest_first(self) -> list[Path]:
        name = run_id(self._run_folder)
        return [p for p in reversed(self._named()) if _may_be_of(name, p) or _is_damaged(name, p)]

    def _named(self) -> list[Path]:
        """Return the folders that are named as a checkpoint, by step."""
        return sorted(self._matching(_PREFIX, ""), key=_step)

    def _abandoned(self) -> list[Path]:
        return sorted(self._matching(_ABANDONED + _PREFIX, r"(\.\d+)?"))

    def _cut_short(self) -> list[Path]:
        partial = re.escape(PARTIAL_SUFFIX)
        found = self._matching(f"({_ABANDONED})?{_PREFIX}", rf"(\.\d+)?{partial}")
        return sorted(found)

    def _matching(self, before: str, behind: str) -> Iterator[Path]:
        form = re.compile(rf"{before}(\d{{8,}}){behind}")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self._folder):
                if form.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)

    def _in_the_way(self, first: int) -> list[Path]:
        """Return whatever has the name of a step from `first` on, folder or not."""
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
        os.utime(aside)  # since when it is abandoned
        return aside


def _step(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _may_be_of(name: str | None, path: Path) -> bool:
    """Say whether a whole checkpoint is of the run `name`: what names no run is anybody's."""
    try:
        facts = read_facts(path)
    except CheckpointError:
        return False
    owner = facts["extra"].get(OWNER)
    return facts["steps_done"] == _step(path) and (None in (name, owner) or owner == name)


def _is_damaged(name: str | None, path: Path) -> bool:
    """Say whether a checkpoint says nothing of itself, and may have been the run's."""
    try:
        read_facts(path)
    except CheckpointError:
        return has_files(path) and _could_be_of(name, path)
    return False


def _could_be_of(name: str | None, path: Path) -> bool:
    """Say whether a folder, whole or damaged, is not known to be of another run.

    A manifest that has changed since it was written may have changed where it names its run.
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
def _told(path: Path) -> Iterator[None]:
    """Tell that an old checkpoint cannot be removed; that is no reason to end a run."""
    try:
        yield
    except OSError as error:
        log.warning("checkpoint %s: cannot be removed: %s", path, error)
