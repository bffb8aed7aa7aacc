"""Jobs of a sweep that a launcher of Hydra runs elsewhere, as submitit_slurm does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from hydra.core.hydra_config import HydraConfig

REQUEUE_EXIT_CODE: Final = 75
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_LEFT_S: Final = 300.0
"""So long a process of a job that is queued again waits to be ended."""


def without_launcher(words: Sequence[str]) -> list[str]:
    """Return a command line without what it says of Hydra's launcher."""
    told = ("hydra/launcher=", "hydra.launcher.", "+hydra.launcher.", "++hydra.launcher.")
    return [word for word in words if not word.startswith(told)]


class Elsewhere:
    """What the launcher calls in each process of each job: the command itself, in a child.

    A process of its own, so that a job's signals and exit code are those of the command, whatever
    Python the launcher holds around it. The launcher pickles this object.
    """

    def __init__(self, module: str, folder: Path) -> None:
        self._module, self._folder = module, folder

    def __call__(self, composed: object) -> int:
        """Run the job whose settings Hydra has just composed; return its exit code."""
        told = HydraConfig.get()
        words = [str(word) for word in told.overrides.task]
        environment = os.environ | {str(k): str(v) for k, v in told.job.env_set.items()}
        code = self._run(words, environment)
        if code == REQUEUE_EXIT_CODE and "SLURM_JOB_ID" in os.environ:
            _queue_again()
        if _is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{told.job.num}.code").write_text(f"{code}\n")
        return code

    def _run(self, words: list[str], environment: dict[str, str]) -> int:
        """Run the command; hand on what asks it to stop, and nothing else hears of that."""
        command = [sys.executable, "-m", self._module, *words]
        for number in _STOP_SIGNALS:
            # A child inherits that it is ignored: until it listens, nothing kills it.
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen(command, env=environment)

        def hand_on(number: int, frame: FrameType | None) -> None:
            child.send_signal(signal.SIGUSR1)

        for number in _STOP_SIGNALS:
            signal.signal(number, hand_on)
        return child.wait()


def _is_first() -> bool:
    """Say whether this is the first process of its job."""
    return os.environ.get("SLURM_PROCID", os.environ.get("SUBMITIT_LOCAL_GLOBALID", "0")) == "0"


def _queue_again() -> None:
    """Let Slurm start this job again, and wait for the end: its launcher must not call it done."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _is_first():
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    time.sleep(_LEFT_S)


def ended_jobs(folder: Path) -> dict[int, int]:
    """Return the exit codes of the jobs that have ended, by their number from 0."""
    return {int(path.stem): int(path.read_text()) for path in folder.glob("*.code")}
