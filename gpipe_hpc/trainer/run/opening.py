"""Open a run folder on rank 0: lock it, compare it with earlier starts, write the settings."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpipe_hpc.checkpoint import read_facts
from gpipe_hpc.config import config_yaml, written
from gpipe_hpc.errors import (
    ConfigError,
    GpipeError,
    NonFiniteError,
    PeerError,
    RunFolderError,
    is_users_mistake,
    os_remedy,
)
from gpipe_hpc.settings import Config
from gpipe_hpc.small_files import read_bytes
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.run.changed_settings import SETTINGS, Change, changes, read_settings
from gpipe_hpc.trainer.run.folder import (
    LAUNCHERS,
    NON_FINITE_FILE,
    REQUEUE_FILE,
    Checkpoints,
    Restart,
    default_run_folder,
    find_restart,
)
from gpipe_hpc.trainer.run.identity import (
    STARTS,
    RunIdentity,
    known_starts,
    read_run,
    write_run,
    write_start,
)
from gpipe_hpc.trainer.run.lock import RunLock
from gpipe_hpc.trainer.signals import REQUEUE_EXIT_CODE, ProcessExit, StopRequest
from gpipe_hpc.trainer.writers import METRICS_FILE

CONFIG_FILE: Final = "config.yaml"


class Refusal(NamedTuple):
    """Error with which rank 0 refuses a start, in a form that can be broadcast to all ranks."""

    words: str
    is_non_finite: bool

    @classmethod
    def of(cls, error: ConfigError | NonFiniteError) -> "Refusal":
        """Create a refusal from the error that rank 0 has raised."""
        return cls(str(error), isinstance(error, NonFiniteError))

    @property
    def error(self) -> ConfigError | NonFiniteError:
        """Return the error for this rank to raise."""
        return NonFiniteError(self.words) if self.is_non_finite else ConfigError(self.words)


@contextmanager
def own_folder(
    config: Config, stop: StopRequest, launchers: Set[str] = frozenset()
) -> Iterator[RunLock]:
    """Context manager that creates and locks the folder of a run, and yields the lock.

    If the run ends before its first step is done, a new folder is removed again, with parent
    folders that were created for it: always for an unnamed folder in runs/, and for a named one if
    the settings are invalid. A NaN or infinite loss or gradient is recorded in a file, since
    launchers restart failed runs. Raises ConfigError or RunFolderError if the folder cannot be
    created or locked.

    Args:
        config: the settings.
        stop: requests to stop.
        launchers: identifiers of the ranks' launchers, as in `find_restart`.
    """
    folder = Path(config.run.dir or default_run_folder()).absolute()
    new = _missing_folders(folder)

    def clear(_: ProcessExit | None = None) -> None:
        if new and config.run.dir is None:
            _remove_unused(folder, new)

    is_locked = False

    def release(ending: ProcessExit) -> None:
        if ending.code == REQUEUE_EXIT_CODE:
            _mark_requeue(folder)
        lock.release()

    try:
        with stop.before_exit(clear), _locked(folder, launchers) as lock, stop.before_exit(release):
            is_locked = True
            with _outcome_marks(folder, config):
                yield lock
    except GpipeError as error:
        clear()
        if new and is_locked and is_users_mistake(error):
            _remove_unused(folder, new)
        raise


@contextmanager
def _outcome_marks(folder: Path, config: Config) -> Iterator[None]:
    """Context manager that writes a file into the folder if the run is stopped or reaches NaN.

    A restart continues a stopped run, also if another rank received the signal, and refuses to
    repeat a run that reached NaN.
    """
    try:
        yield
    except PeerError as error:
        if error.is_stop:
            with suppress(OSError):
                _mark_requeue(folder)
        raise
    except NonFiniteError as error:
        # Mode "x" keeps an existing mark. On a full disk the original error is raised.
        with suppress(OSError), (folder / NON_FINITE_FILE).open("x", encoding="utf-8") as mark:
            mark.write(f"{error}\n{_settings_hash(config)}\n")
        raise


def _mark_requeue(folder: Path) -> None:
    (folder / REQUEUE_FILE).write_text(f"{_newest_step(folder)}\n")


def _settings_hash(config: Config) -> str:
    """Return a hash of all settings except the sections `run` and `comm`."""
    told = {name: each for name, each in written(config).items() if name not in ("run", "comm")}
    text = json.dumps(told, sort_keys=True, default=str)
    return f"settings {hashlib.sha256(text.encode()).hexdigest()}"


def _missing_folders(folder: Path) -> list[Path]:
    """Return the folder and those of its parents that do not exist, innermost first."""
    return [each for each in (folder, *folder.parents) if not os.path.lexists(each)]


def _remove_unused(folder: Path, new: Sequence[Path]) -> None:
    """Remove the folder of a run that trained nothing, and the parents created for it."""
    with suppress(OSError):  # it was not created, or a parent is in use
        if _has_begun(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        for each in new[1:]:
            each.rmdir()


def _newest_step(folder: Path) -> int:
    """Return the step in the name of the newest checkpoint; 0 if there is none."""
    names = (path.name.removeprefix("step_") for path in folder.glob("checkpoints/step_*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _has_begun(folder: Path) -> bool:
    metrics = folder / METRICS_FILE
    return any(folder.glob("checkpoints/*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _locked(folder: Path, launchers: Set[str]) -> RunLock:
    try:
        restart = find_restart(folder, launchers=launchers)
        folder.mkdir(parents=True, exist_ok=True)
        return RunLock.acquire(folder, waits=restart.by_launcher or restart.has_mark)
    except OSError as error:
        raise _unwritable(folder, error) from error


def begin(config: Config, lock: RunLock, launchers: Set[str] = frozenset()) -> RunIdentity:
    """Write the files of a new start into the locked run folder.

    Settings of earlier starts are renamed to config_1.yaml and so on. A start that only validates
    an existing checkpoint changes nothing. Nothing is written if the start is refused.

    Raises:
        ConfigError: if settings differ that must not change; it names them.
        NonFiniteError: if no setting differs and the run reached a NaN or infinite loss.
    """
    folder = lock.folder
    restart = find_restart(folder, launchers=launchers)
    told = read_run(folder)
    if told and last_step(config.train) == 0:
        return RunIdentity(folder, told["id"], restart.by_launcher)
    last_start = read_settings(folder / CONFIG_FILE)
    changed = changes(last_start, config)
    differing = _differing(config, folder, last_start)
    _refuse_changes(config, folder, restart, differing)
    if restart.by_launcher or config.checkpoint.resume == "auto":
        _refuse_non_finite(folder, config)
    notes = [f"continuing with a changed setting: {change}" for change in differing]
    if restart.has_mark and not restart.by_launcher and config.checkpoint.resume != "auto":
        notes.append(
            f"the previous start was stopped to be continued, but checkpoint.resume="
            f"{config.checkpoint.resume} takes precedence; set it to auto to continue"
        )
    try:
        _keep_settings(folder, config_yaml(config))
        lineage = _lineage(config, restart, changed, told.get("lineage"))
        starts = told.get(STARTS, {}) if lineage == told.get("lineage") else {}
        about = {"lineage": lineage, LAUNCHERS: sorted(launchers), STARTS: starts}
        name = write_run(folder, about)
        (folder / REQUEUE_FILE).unlink(missing_ok=True)
        (folder / NON_FINITE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    known = tuple(known_starts(about).items())
    return RunIdentity(folder, name, restart.by_launcher, tuple(notes), lineage, known)


def record_start(folder: Path, steps_done: int, start: str | None) -> None:
    """Record in run.json the step from which this start resumes, and its name `start`."""
    try:
        write_start(folder, steps_done, start)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _differing(config: Config, folder: Path, last_start: Mapping[str, Any]) -> list[Change]:
    """Return the settings that differ from those of the checkpoint that resume=auto would use.

    The previous start may have had other settings and failed, so its settings are compared only if
    the checkpoint, of an older version, does not contain its own.
    """
    newest = Checkpoints(folder, 1).newest() if config.checkpoint.resume == "auto" else None
    if newest is None:
        return []
    return changes(read_facts(newest)["extra"].get(SETTINGS) or last_start, config)


def _lineage(config: Config, restart: Restart, changed: Sequence[Change], before: object) -> str:
    """Return an identifier of the run's history, which usable in-memory checkpoints share."""
    is_same = restart.by_launcher or config.checkpoint.resume == "auto"
    is_other = any(not change.is_layout for change in changed)
    return before if isinstance(before, str) and is_same and not is_other else uuid.uuid4().hex


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    remedy = os_remedy(error)
    return ConfigError(
        f"config: bad run.dir: {folder} is not a writable folder "
        f"({error.strerror}); {f'{remedy}, or ' if remedy else ''}choose another folder"
    )


def _refuse_changes(
    config: Config, folder: Path, restart: Restart, differing: Sequence[Change]
) -> None:
    """Raise ConfigError if the folder contains a run with other settings, unless this is a restart.

    A restart is recognized by a requeue mark, or by its launcher. In the default folder the
    launcher does not suffice: the second command of a restarted job would find the run of the
    first.
    """
    is_named = config.run.dir is not None
    if restart.has_mark or (restart.by_launcher and is_named):
        return
    # Changed data may be allowed by checkpoint.data.
    is_allowed = config.checkpoint.data != "same"
    refused = [c for c in differing if not (c.is_layout or (is_allowed and c.is_of_data))]
    if refused:
        lines = "".join(f"\n  {change}" for change in refused)
        raise ConfigError(
            f"config: {folder} holds a run with other settings, so checkpoint.resume=auto cannot "
            f"continue it:{lines}\nchoose another run.dir for a new run, "
            f"checkpoint.resume={folder} to continue with the changed settings, or "
            "checkpoint.resume=never to start over here"
        )


def _refuse_non_finite(folder: Path, config: Config) -> None:
    """Raise NonFiniteError if a run with the same settings already reached NaN in this folder.

    Otherwise a launcher would restart the failing run many times.
    """
    mark = folder / NON_FINITE_FILE
    try:
        before = read_bytes(mark).decode("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run: {mark}, which marks a run that reached NaN, cannot be read: "
            f"{error}; {os_remedy(error) or 'check it'}, or remove it"
        ) from error
    said, _, asked = before.rpartition("\n")
    if asked == _settings_hash(config):
        raise NonFiniteError(
            f"run: these settings reached a loss or gradient that is NaN or infinite in {folder}; "
            f"change a setting, or remove {mark} to try them again; the run reported: {said}"
        )


def _keep_settings(folder: Path, text: str) -> None:
    """Write config.yaml, and keep a copy of a different existing one as config_<number>.yaml."""
    path = folder / CONFIG_FILE
    if path.exists():
        try:
            before = read_bytes(path)
        except ValueError as error:
            raise RunFolderError(
                f"run.dir {folder}: cannot read the settings of an earlier start in "
                f"{CONFIG_FILE}: {error}; move it away, or choose another run.dir"
            ) from error
        if before == text.encode():
            return
        numbers = [each.stem.removeprefix("config_") for each in folder.glob("config_*.yaml")]
        count = max((int(number) for number in numbers if number.isdecimal()), default=0)
        shutil.copyfile(path, folder / f"config_{count + 1}.yaml")
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, "utf-8")
    os.replace(aside, path)
