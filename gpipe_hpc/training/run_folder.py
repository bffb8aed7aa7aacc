"""Where a run writes: one folder, decided once, and its checkpoints."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from gpipe_hpc.checkpoint import PARTIAL_SUFFIX, read_facts
from gpipe_hpc.errors import ConfigError

REQUEUE_FILE = "REQUEUE"
_PREFIX = "step_"
_ABANDONED = "abandoned_"
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def default_run_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return runs/<name>, the same name when a launcher starts this run again.

    A restarted worker of torchrun and a requeued job of Slurm must find what they had saved, so
    the name comes from the job, or from the launcher: when it was started, and its process number,
    which keeps apart runs that start in the same second.
    """
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" in env:
        return Path("runs") / f"slurm_{env['SLURM_JOB_ID']}"
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


def is_restart(folder: Path, environ: Mapping[str, str] | None = None) -> bool:
    """Say whether a run was here that a launcher, or its own requeue mark, has started again."""
    env = os.environ if environ is None else environ
    counts = (env.get(name, "0") for name in _RESTART_COUNTS)
    return (folder / REQUEUE_FILE).exists() or any(count != "0" for count in counts)


def prepare_run_folder(folder: Path) -> Path:
    """Create the folder; ConfigError if that cannot be. Takes back an earlier requeue mark."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REQUEUE_FILE).unlink(missing_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"config: bad run.dir, expected a folder that can be written, got {folder} "
            f"({error.strerror}); choose another"
        ) from error
    return folder


class Checkpoints:
    """The checkpoints of a run folder, by step; the newest `keep` stay."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self._folder = run_folder / "checkpoints"
        self._keep = keep

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step belongs."""
        return self._folder / f"{_PREFIX}{step:08d}"

    def all(self) -> list[Path]:
        """Return the whole checkpoints, oldest first; what a kill cut short is not among them."""
        found = self._folder.glob(f"{_PREFIX}*")
        return sorted(path for path in found if not path.name.endswith(PARTIAL_SUFFIX))

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        return self.all()[-1] if self.all() else None

    def prune(self) -> None:
        """Remove all but the newest `keep`, and what was cut short."""
        for path in self.all()[: -self._keep]:
            # Under another name first: a kill must not leave half of it under this one.
            path.rename(path.with_name(path.name + PARTIAL_SUFFIX))
        for path in self._folder.glob(f"*{PARTIAL_SUFFIX}"):
            shutil.rmtree(path)

    def set_aside(self, resumed: Path | None) -> list[Path]:
        """Rename what an earlier run saved past the step that this one starts from.

        This run will write those steps anew, and a later one must not take the old for newest.
        """
        first = self.path(0 if resumed is None else read_facts(resumed)["steps_done"])
        kept = None if resumed is None else resumed.resolve()
        stale = [p for p in self.all() if p.name >= first.name and p.resolve() != kept]
        aside = [path.with_name(_ABANDONED + path.name) for path in stale]
        for path, name in zip(stale, aside, strict=True):
            shutil.rmtree(name, ignore_errors=True)
            path.rename(name)
        return aside

    def resume_from(self, resume: str, is_restart: bool = False) -> Path | None:
        """Return what `checkpoint.resume` asks for: auto, never, or a path.

        A path may be a checkpoint or a run folder, whose newest is taken. A restart goes on from
        what it saved itself, if anything. ConfigError if nothing is there, CheckpointError if it
        is no checkpoint.
        """
        own = self.newest()
        if resume == "auto" or (is_restart and own is not None):
            return own
        if resume == "never":
            return None
        path = Path(resume)
        newest = Checkpoints(path, self._keep).newest()
        if newest is not None:
            return newest
        if not path.is_dir():
            raise ConfigError(
                f"config: bad checkpoint.resume, expected a checkpoint or a run folder, got "
                f"{path}, which is not there; use auto, never or the path of one"
            )
        read_facts(path)
        return path
