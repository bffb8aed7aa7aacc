"""Where a run writes: one folder, decided once, and its checkpoints."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from gpipe_hpc.checkpoint import PARTIAL_SUFFIX, read_facts
from gpipe_hpc.errors import CheckpointError, ConfigError

REQUEUE_FILE = "REQUEUE"
_PREFIX = "step_"


def default_run_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return runs/<name>, the same name when a launcher starts this run again.

    A restarted worker of torchrun and a requeued job of Slurm must find what they had saved, so
    the name comes from the job, or from the moment the launcher itself was started.
    """
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" in env:
        return Path("runs") / f"slurm_{env['SLURM_JOB_ID']}"
    started_s = _parent_start_s() if "TORCHELASTIC_RUN_ID" in env else None
    moment = time.localtime(time.time() if started_s is None else started_s)
    return Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S", moment)


def _parent_start_s() -> float | None:
    """Return when the parent process was started, where /proc tells."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    # Rounded, as the two clocks are read at slightly different moments each time.
    return round(time.time() - uptime_s + int(fields[19]) / ticks_per_s)


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
            shutil.rmtree(path)
        for path in self._folder.glob(f"*{PARTIAL_SUFFIX}"):
            shutil.rmtree(path)

    def resume_from(self, resume: str) -> Path | None:
        """Return what `checkpoint.resume` asks for: auto, never, or a path.

        A path may be a checkpoint or a run folder, whose newest is taken. CheckpointError if
        there is none.
        """
        if resume == "never":
            return None
        if resume == "auto":
            return self.newest()
        path = Path(resume)
        newest = Checkpoints(path, self._keep).newest()
        if newest is not None:
            return newest
        if not path.is_dir():
            raise CheckpointError(
                f"config: bad checkpoint.resume, expected a checkpoint or a run folder, got "
                f"{path}, which is not there; use auto, never or the path of one"
            )
        read_facts(path)
        return path
