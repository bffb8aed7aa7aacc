"""What takes the figures of a run: ``metrics.jsonl``, a line a step, and TensorBoard."""

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
    """Takes the scalars of one step."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Record the scalars of a finished step."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Finish; nothing may be written after. `error`: what has ended the run, if anything."""
        ...


class JsonLines:
    """A line of JSON a step, in the hands of the system as soon as `write` returns.

    A run that resumes after step n drops what an earlier one wrote past n, and a line cut short
    by a kill or a full disk. None drops nothing: such a run takes no step.
    """

    def __init__(self, path: Path, resumed_step: int | None = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _refuse_other(path)
            if resumed_step is not None:
                _keep_until(path, resumed_step)
        # Without a buffer: what could not be written does not come again when the file is closed.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, scalars: Scalars) -> None:
        """Append ``{"step": step, ...}``; JSON knows no NaN, so what is not finite becomes null."""
        line = {"step": step, **{name: _finite(value) for name, value in scalars.items()}}
        left = f"{json.dumps(line, allow_nan=False)}\n".encode()
        while left:  # on a disk that fills up a part of it is written first
            left = left[self._file.write(left) :]

    def close(self, error: BaseException | None = None) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars as TensorBoard event files in a folder."""

    def __init__(self, folder: Path, resumed_step: int | None = 0) -> None:
        # Here, since it takes a second to load and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        purged = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(folder, purge_step=purged)
        self._quiet = _QuietThreads()

    def write(self, step: int, scalars: Scalars) -> None:
        """Record those scalars that have a value."""
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self, error: BaseException | None = None) -> None:
        """Write out what is pending."""
        try:
            self._writer.close()
        finally:
            self._quiet.end()


class _QuietThreads:
    """Lets no traceback be printed for what ends TensorBoard's thread, as where a disk is full.

    It raises that once more from the next write or the end, and there we say what to do.
    """

    def __init__(self) -> None:
        self._before = threading.excepthook
        self._own = self._print
        self._is_over = False
        threading.excepthook = self._own

    def end(self) -> None:
        """Put back what was there before; where somebody has put another one there, pass on."""
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
