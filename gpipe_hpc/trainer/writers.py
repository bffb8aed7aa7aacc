"""Writers of metrics: ``metrics.jsonl``, with a line per step, and TensorBoard."""

import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from gpipe_hpc.errors import RunFolderError, os_remedy
from gpipe_hpc.small_files import open_regular, parse_json

METRICS_FILE: Final = "metrics.jsonl"

Scalars = Mapping[str, float | int | None]


class MetricsWriter(Protocol):
    """Interface of writers that record the scalars of each step."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Record the scalars of a finished step."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Close the writer; `error` is the error that ended the run, if any."""
        ...


class JsonLines:
    """Writer of one line of JSON per step, unbuffered.

    Lines of an earlier run after `resumed_step`, and an incomplete line, are removed first; none if
    `resumed_step` is None, for a run that trains no step.
    """

    def __init__(self, path: Path, resumed_step: int | None = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _refuse_other(path)
            if resumed_step is not None:
                _keep_until(path, resumed_step)
        # Unbuffered: data that could not be written is not written again at closing.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, scalars: Scalars) -> None:
        """Append ``{"step": step, ...}``; NaN and infinity, which JSON lacks, become null."""
        line = {"step": step, **{name: _finite(value) for name, value in scalars.items()}}
        left = f"{json.dumps(line, allow_nan=False)}\n".encode()
        while left:  # a nearly full disk may accept only a part
            left = left[self._file.write(left) :]

    def close(self, error: BaseException | None = None) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writer of scalars as TensorBoard event files in a folder.

    Events of an earlier run after `resumed_step` are hidden, unless it is None.
    """

    def __init__(self, folder: Path, resumed_step: int | None = 0) -> None:
        # Imported here: the import takes a second and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        purged = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(folder, purge_step=purged)
        self._quiet = _QuietThreads()

    def write(self, step: int, scalars: Scalars) -> None:
        """Write the scalars that have a value."""
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self, error: BaseException | None = None) -> None:
        """Flush pending events and close the files."""
        try:
            self._writer.close()
        finally:
            self._quiet.end()


class _QuietThreads:
    """Suppress tracebacks of TensorBoard's thread, for example if a disk is full.

    TensorBoard raises the same error again from the next write or close, where it is reported.
    """

    def __init__(self) -> None:
        self._before = threading.excepthook
        self._own = self._print
        self._is_over = False
        threading.excepthook = self._own

    def end(self) -> None:
        """Restore the previous excepthook; if another one was installed, only stop suppressing."""
        self._is_over = True
        if threading.excepthook is self._own:
            threading.excepthook = self._before

    def _print(self, what: threading.ExceptHookArgs) -> None:
        if self._is_over or not type(what.thread).__module__.startswith("tensorboard."):
            self._before(what)


def _finite(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None


def _refuse_other(path: Path) -> None:
    try:
        open_regular(path).close()
    except (OSError, ValueError) as error:
        remedy = os_remedy(error) or "remove it"
        raise RunFolderError(
            f"run.dir {path.parent}: cannot read {path.name} of an earlier start: {error}; "
            f"{remedy}, or choose another run.dir"
        ) from error


def _keep_until(path: Path, last_step: int) -> None:
    kept = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            if parse_json(line)["step"] <= last_step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    aside = path.with_name(path.name + ".part")
    aside.write_text("".join(kept), "utf-8")
    os.replace(aside, path)
