"""The start of a run in its folder, by rank 0: locked, compared with earlier starts, written."""

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
    Run,
    known_starts,
    read_run,
    write_run,
    write_start,
)
from gpipe_hpc.trainer.run.lock import RunLock
from gpipe_hpc.trainer.signals import REQUEUE_EXIT_CODE, Ending, StopRequest
from gpipe_hpc.trainer.writers import METRICS_FILE

CONFIG_FILE: Final = "config.yaml"


class Refusal(NamedTuple):
    """Why rank 0 refuses a start, told to all ranks: each ends with the code that rank 0 does."""

    words: str
    is_non_finite: bool

    @classmethod
    def of(cls, error: ConfigError | NonFiniteError) -> "Refusal":
        """Return what an error says."""
        return cls(str(error), isinstance(error, NonFiniteError))

    @property
    def error(self) -> ConfigError | NonFiniteError:
        """Return an error that says it."""
        return NonFiniteError(self.words) if self.is_non_finite else ConfigError(self.words)


@contextmanager
def own_folder(
    config: Config, stop: StopRequest, launchers: Set[str] = frozenset()
) -> Iterator[RunLock]:
    """Make the folder of a run and lock it; ConfigError or RunFolderError if that cannot be.

    `launchers`: who has started the ranks, as in `find_restart`.

    A new folder goes again, with those around it that were made for it, if the run ends before its
    first step is done: one in runs/, which nobody has named, however it ends, and one that was
    named if its settings cannot work. There is nothing in it that was not said.

    A run that came to a loss or gradient that is NaN or infinite leaves a mark: launchers start it
    again.
    """
    folder = Path(config.run.dir or default_run_folder()).absolute()
    new = _not_there(folder)

    def clear(_: Ending | None = None) -> None:
        if new and config.run.dir is None:
            _remove_unused(folder, new)

    is_locked = False

    def give_back(ending: Ending) -> None:
        if ending.code == REQUEUE_EXIT_CODE:
            _mark_requeue(folder)
        lock.give_back()

    try:
        with stop.doing_last(clear), _locked(folder, launchers) as lock, stop.doing_last(give_back):
            is_locked = True
            with _marking(folder, config):
                yield lock
    except GpipeError as error:
        clear()
        if new and is_locked and is_users_mistake(error):
            _remove_unused(folder, new)
        raise


@contextmanager
def _marking(folder: Path, config: Config) -> Iterator[None]:
    """Let a folder say, while it is locked, why the same start would fail, or would go on.

    It goes on after a signal that another rank was sent before the first step, or obeyed too late.
    """
    try:
        yield
    except PeerError as error:
        if error.is_stop:
            with suppress(OSError):
                _mark_requeue(folder)
        raise
    except NonFiniteError as error:
        # A start that is refused for the mark leaves it. On a full disk the error itself is told.
        with suppress(OSError), (folder / NON_FINITE_FILE).open("x", encoding="utf-8") as mark:
            mark.write(f"{error}\n{_asked(config)}\n")
        raise


def _mark_requeue(folder: Path) -> None:
    (folder / REQUEUE_FILE).write_text(f"{_newest_step(folder)}\n")


def _asked(config: Config) -> str:
    """Return a hash of all that a start was asked for, but for its folder and its network."""
    told = {name: each for name, each in written(config).items() if name not in ("run", "comm")}
    text = json.dumps(told, sort_keys=True, default=str)
    return f"settings {hashlib.sha256(text.encode()).hexdigest()}"


def _not_there(folder: Path) -> list[Path]:
    """Return a folder and those around it that are not there, the innermost first."""
    return [each for each in (folder, *folder.parents) if not os.path.lexists(each)]


def _remove_unused(folder: Path, new: Sequence[Path]) -> None:
    """Remove the folder of a run that trained nothing, and those made around it."""
    with suppress(OSError):  # it could not be made, or somebody else uses those around it, too
        if _has_begun(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        for each in new[1:]:
            each.rmdir()


def _newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint, by its name; 0 where there is none."""
    names = (path.name.removeprefix("step_") for path in folder.glob("checkpoints/step_*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _has_begun(folder: Path) -> bool:
    metrics = folder / METRICS_FILE
    return any(folder.glob("checkpoints/*")) or (metrics.exists() and metrics.stat().st_size > 0)


def _locked(folder: Path, launchers: Set[str]) -> RunLock:
    try:
        restart = find_restart(folder, launchers=launchers)
        folder.mkdir(parents=True, exist_ok=True)
        return RunLock.take(folder, waits=restart.by_launcher or restart.has_mark)
    except OSError as error:
        raise _unwritable(folder, error) from error


def begin(config: Config, lock: RunLock, launchers: Set[str] = frozenset()) -> Run:
    """Write what a start of a run leaves in its folder, which is locked.

    What cannot go on is refused before anything is written: ConfigError with the settings that
    differ; NonFiniteError where none at all does, and the run came to a loss that is NaN or
    infinite. The settings of earlier starts are kept as config_1.yaml and so on. A start that only
    validates an earlier one's checkpoint leaves all as it is.
    """
    folder = lock.folder
    restart = find_restart(folder, launchers=launchers)
    told = read_run(folder)
    if told and last_step(config.train) == 0:
        return Run(folder, told["id"], restart.by_launcher)
    last_start = read_settings(folder / CONFIG_FILE)
    changed = changes(last_start, config)
    differing = _differing(config, folder, last_start)
    _refuse_changes(config, folder, restart, differing)
    if restart.by_launcher or config.checkpoint.resume == "auto":
        _refuse_non_finite(folder, config)
    notes = [f"going on with another setting, {change}" for change in differing]
    if restart.has_mark and not restart.by_launcher and config.checkpoint.resume != "auto":
        notes.append(
            f"the run was to go on where it had stopped, but checkpoint.resume="
            f"{config.checkpoint.resume} says otherwise and holds; auto would go on"
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
    return Run(folder, name, restart.by_launcher, tuple(notes), lineage, known)


def go_on_from(folder: Path, steps_done: int, start: str | None) -> None:
    """Keep after which step this start goes on with the run; `start`: its name in its copies."""
    try:
        write_start(folder, steps_done, start)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _differing(config: Config, folder: Path, last_start: Mapping[str, Any]) -> list[Change]:
    """Return the settings that differ from those of the checkpoint that auto would go on from.

    The start before this one may have had others, and failed. An older version's checkpoint says
    nothing of its settings; then the last start's are taken.
    """
    newest = Checkpoints(folder, 1).newest() if config.checkpoint.resume == "auto" else None
    if newest is None:
        return []
    return changes(read_facts(newest)["extra"].get(SETTINGS) or last_start, config)


def _lineage(config: Config, restart: Restart, changed: Sequence[Change], before: object) -> str:
    """Return what tells apart histories of one run: states of another are none of this one's."""
    is_same = restart.by_launcher or config.checkpoint.resume == "auto"
    is_other = any(not change.is_layout for change in changed)
    return before if isinstance(before, str) and is_same and not is_other else uuid.uuid4().hex


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    remedy = os_remedy(error)
    return ConfigError(
        f"config: bad run.dir, expected a folder that can be written, got {folder} "
        f"({error.strerror}); {f'{remedy}; or ' if remedy else ''}choose another"
    )


def _refuse_changes(
    config: Config, folder: Path, restart: Restart, differing: Sequence[Change]
) -> None:
    """Refuse to take another run's checkpoint for this one's.

    A requeue mark, or a launcher that starts the run again, says that it is the same run. But in
    the default folder a restarted job's second command would find the first one's.
    """
    is_named = config.run.dir is not None
    if restart.has_mark or (restart.by_launcher and is_named):
        return
    # What differs in the data may be allowed by itself.
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
    """Refuse to train to the same NaN again: launchers start a run that failed many times."""
    mark = folder / NON_FINITE_FILE
    try:
        before = read_bytes(mark).decode("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run: bad {mark}, expected the file that a run leaves when it comes to NaN, got "
            f"{error}; {os_remedy(error) or 'look at it'}, or remove it"
        ) from error
    said, _, asked = before.rpartition("\n")
    if asked == _asked(config):
        raise NonFiniteError(
            f"run: these settings reached a loss or gradient that is NaN or infinite in {folder}; "
            f"change a setting, or remove {mark} to try them again; the run reported: {said}"
        )


def _keep_settings(folder: Path, text: str) -> None:
    """Write config.yaml; another one that is there gets a number."""
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
