"""What a run measured: ``metrics.jsonl``, a line a step, and the same scalars for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, SupportsFloat

from gpipe_hpc.comm.world import World, together
from gpipe_hpc.errors import ConfigError, RunFolderError, os_remedy

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

METRICS_FILE: Final = "metrics.jsonl"

Scalars = Mapping[str, float | int | None]
Given = Mapping[str, SupportsFloat | None]
"""Scalars as a script has them: numbers of torch and NumPy, too."""


class MetricsWriter(Protocol):
    """Takes the scalars of one step."""

    def write(self, step: int, scalars: Scalars) -> None:
        """Record the scalars of a finished step."""
        ...

    def close(self) -> None:
        """Finish; nothing may be written after."""
        ...


class JsonLines:
    """A line of JSON a step, in the hands of the system as soon as `write` returns.

    A run that resumes after step n drops what an earlier one wrote past n, and a line cut short
    by a kill or a full disk. None drops nothing: such a run takes no step.
    """

    def __init__(self, path: Path, resumed_step: int | None = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and resumed_step is not None:
            _keep_until(path, resumed_step)
        # Without a buffer: what could not be written does not come again when the file is closed.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, scalars: Scalars) -> None:
        """Append ``{"step": step, ...}``; JSON knows no NaN, so what is not finite becomes null."""
        line = {"step": step, **{name: _finite(value) for name, value in scalars.items()}}
        left = f"{json.dumps(line, allow_nan=False)}\n".encode()
        while left:  # on a disk that fills up a part of it is written first
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars as TensorBoard event files in a folder."""

    def __init__(self, folder: Path, resumed_step: int | None = 0) -> None:
        # Here, since it takes a second to load and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        purged = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(folder, purge_step=purged)

    def write(self, step: int, scalars: Scalars) -> None:
        """Record those scalars that have a value."""
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is pending."""
        self._writer.close()


class Metrics:
    """Several writers as one, closed on leaving a ``with`` block.

    A script's own: ``with Metrics.of(pipe, "runs/mine") as metrics:``, and after each step
    ``metrics.write(pipe.steps_done, result.scalars() | {"lr": lr}, num_samples=64)``, on every
    rank.
    """

    @classmethod
    def of(cls, pipe: "Pipeline", folder: str | Path) -> "Metrics":
        """Return what writes `metrics.jsonl` and `tensorboard/` in `folder`, on rank 0 alone.

        What an earlier run wrote there past `pipe.steps_done` is dropped, so load a checkpoint
        before. No rank waits for another.
        """
        if pipe.world.rank:
            return cls()
        writers = _writers(Path(folder), pipe.steps_done)
        pace = Pace(pipe.steps_done)
        return cls(*writers, pace=pace, folder=Path(folder), world=pipe.world)

    def __init__(
        self,
        *writers: MetricsWriter,
        pace: "Pace | None" = None,
        folder: Path | None = None,
        world: World | None = None,
    ) -> None:
        self._writers, self._pace = writers, pace
        self._folder, self._world = folder, world

    def write(
        self,
        step: int,
        scalars: Given,
        *,
        num_samples: int | None = None,
        grad_norm: SupportsFloat | None = None,
    ) -> None:
        """Record the scalars of a finished step everywhere.

        In a script's own the first line of a step also has `step_time_s`, the seconds since the
        step before (since `of`, for the first), and with `num_samples`, those of the global batch,
        `samples_per_s`. `grad_norm`: what `pipe.clip_grad_norm_` returned. Numbers of torch and
        NumPy are taken too. Raises ConfigError for what is no number, RunFolderError where the
        folder does not take it.
        """
        if not self._writers:
            return
        paced = {} if self._pace is None else self._pace.of(step, num_samples)
        norm = {} if grad_norm is None else {"grad_norm": grad_norm}
        numbers = {name: _number(name, each) for name, each in {**norm, **scalars}.items()}
        with _refused(self._folder, self._world):
            for writer in self._writers:
                writer.write(step, {**paced, **numbers})

    def close(self) -> None:
        """Close all writers. Raises RunFolderError where the folder does not take what is left."""
        with _refused(self._folder, self._world), ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What goes wrong behind an error is most often that error again.
        with suppress(*() if error is None else (RunFolderError,)):
            self.close()


class Pace:
    """What steps take, from one to the next."""

    def __init__(self, steps_done: int) -> None:
        self._step, self._ended_s = steps_done, time.perf_counter()

    def of(self, step: int, num_samples: int | None) -> dict[str, float]:
        """Return what a step took; nothing of one that was told before. Of several their mean."""
        now_s = time.perf_counter()
        num_steps = step - self._step
        if num_steps <= 0:
            return {}
        seconds = (now_s - self._ended_s) / num_steps
        self._step, self._ended_s = step, now_s
        told = {"step_time_s": seconds}
        return told if num_samples is None else {**told, "samples_per_s": num_samples / seconds}


def open_metrics(
    run_dir: Path, resumed_step: int | None = 0, world: World | None = None
) -> Metrics:
    """Return the writers of a run: ``metrics.jsonl`` and the folder ``tensorboard``.

    What an earlier run wrote there past `resumed_step` is dropped; nothing if that is None. The
    other ranks of `world` are told of what goes wrong: they write nothing, and would wait.
    """
    return Metrics(*_writers(run_dir, resumed_step), folder=run_dir, world=world)


@contextmanager
def _refused(folder: Path | None, world: World | None) -> Iterator[None]:
    """Say in which folder something could not be written, and what to do, also to other ranks."""
    try:
        yield
    except OSError as error:
        with nullcontext() if world is None else together(world, "writing metrics"):
            raise RunFolderError(
                f"metrics: expected to write a line for each step in {folder}, got {error}; "
                f"{os_remedy(error) or 'look at the folder'}, and start again: a run goes on from "
                f"its newest checkpoint"
            ) from error


def _writers(folder: Path, resumed_step: int | None) -> tuple[MetricsWriter, MetricsWriter]:
    return (
        JsonLines(folder / METRICS_FILE, resumed_step),
        TensorBoard(folder / "tensorboard", resumed_step),
    )


def _number(name: str, value: SupportsFloat | None) -> float | int | None:
    """Return a number as Python's own: those of torch and NumPy are none that JSON knows."""
    if value is None:
        return None
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"metrics: {name} is no number, expected one for each step, got {value!r:.80}; leave "
            f"it out, or write a mean of it"
        ) from error


def _finite(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None


def _keep_until(path: Path, last_step: int) -> None:
    kept = []
    for line in path.read_text("utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if step <= last_step:
            kept.append(line + "\n")
    aside = path.with_name(path.name + ".part")
    aside.write_text("".join(kept), "utf-8")
    os.replace(aside, path)
