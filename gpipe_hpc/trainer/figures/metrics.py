"""Metrics of a run, written to `metrics.jsonl` and to experiment trackers."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsFloat

from gpipe_hpc.comm.world.world import World, broadcast_errors
from gpipe_hpc.errors import ConfigError, RunFolderError, os_remedy
from gpipe_hpc.trainer.figures.trackers import TrackedRun, open_trackers
from gpipe_hpc.trainer.writers import METRICS_FILE, JsonLines, MetricsWriter

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

ScalarValues = Mapping[str, SupportsFloat | None]
"""Scalars of Python, torch or NumPy, by name."""


class Metrics:
    """Context manager that writes the metrics of each step to `metrics.jsonl` and to trackers.

    In a script: ``with Metrics.of(pipe, "runs/mine") as metrics:``, and after each step, on every
    rank, ``metrics.write(pipe.steps_done, result.scalars() | {"lr": lr}, num_samples=64)``.
    """

    @classmethod
    def of(
        cls, pipe: "Pipeline", folder: str | Path, to: Sequence[str] = ("tensorboard",)
    ) -> "Metrics":
        """Return a writer of `metrics.jsonl` in `folder` and of trackers; only rank 0 writes.

        Lines that an earlier run wrote after `pipe.steps_done` are removed from `metrics.jsonl` and
        TensorBoard, so load a checkpoint first. Not collective. Raises ConfigError if a tracker
        cannot be opened.

        Args:
            pipe: the pipeline.
            folder: the folder.
            to: names of trackers: tensorboard (a folder in `folder`), wandb or mlflow.
        """
        if pipe.world.rank:
            return cls()
        tracked = TrackedRun(Path(folder), pipe.steps_done, {})
        writers = _writers(tracked, to)
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
        scalars: ScalarValues,
        *,
        num_samples: int | None = None,
        grad_norm: SupportsFloat | None = None,
    ) -> None:
        """Record the scalars of a finished step.

        In a script, the first line of a step also has `step_time_s`, the seconds since the previous
        step (since `of`, for the first), and `samples_per_s`. Numbers of torch and NumPy are
        accepted.

        Args:
            step: the step.
            scalars: the scalars by name.
            num_samples: size of the global batch, for `samples_per_s`.
            grad_norm: the result of `pipe.clip_grad_norm_`.

        Raises:
            ConfigError: if a value is not a number.
            RunFolderError: if the folder cannot be written.
        """
        if not self._writers:
            return
        paced = {} if self._pace is None else self._pace.of(step, num_samples)
        norm = {} if grad_norm is None else {"grad_norm": grad_norm}
        numbers = {name: _number(name, each) for name, each in {**norm, **scalars}.items()}
        with _refused(self._folder, self._world):
            for writer in self._writers:
                writer.write(step, {**paced, **numbers})

    def close(self, error: BaseException | None = None) -> None:
        """Close all writers; raise RunFolderError if the folder cannot be written.

        `error` is the error that ended the run, if any; trackers then show the run as failed.
        """
        with _refused(self._folder, self._world), ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close, error)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, closing most often fails for the same reason.
        with suppress(*() if error is None else (RunFolderError,)):
            self.close(error)


class Pace:
    """Timer for the steps of a user's script."""

    def __init__(self, steps_done: int) -> None:
        self._step, self._ended_s = steps_done, time.perf_counter()

    def of(self, step: int, num_samples: int | None) -> dict[str, float]:
        """Return step time and samples/s since the last call; empty if there is no new step."""
        now_s = time.perf_counter()
        num_steps = step - self._step
        if num_steps <= 0:
            return {}
        seconds = (now_s - self._ended_s) / num_steps
        self._step, self._ended_s = step, now_s
        told = {"step_time_s": seconds}
        return told if num_samples is None else {**told, "samples_per_s": num_samples / seconds}


def open_metrics(
    run_dir: Path,
    resumed_step: int | None = 0,
    world: World | None = None,
    *,
    to: Sequence[str] = ("tensorboard",),
    settings: Mapping[str, Any] | None = None,
) -> Metrics:
    """Return the writers of a run: ``metrics.jsonl``, and the trackers in `to`.

    Lines that an earlier run wrote after `resumed_step` are removed, none if it is None. Errors are
    also raised on the other ranks of `world`, which write nothing and would otherwise wait.
    `settings` are recorded by trackers. Raises ConfigError if a tracker cannot be opened.
    """
    tracked = TrackedRun(run_dir, resumed_step, settings or {})
    return Metrics(*_writers(tracked, to), folder=run_dir, world=world)


@contextmanager
def _refused(folder: Path | None, world: World | None) -> Iterator[None]:
    """Convert OSError to a RunFolderError with a remedy, which all ranks of `world` raise."""
    try:
        yield
    except OSError as error:
        with nullcontext() if world is None else broadcast_errors(world, "writing metrics"):
            raise RunFolderError(
                f"metrics: cannot write to {folder}: {error}; "
                f"{os_remedy(error) or 'check the folder'}, and start again: a run resumes from "
                "its newest checkpoint"
            ) from error


def _writers(tracked: TrackedRun, to: Sequence[str]) -> list[MetricsWriter]:
    trackers = open_trackers(to, tracked)
    return [JsonLines(tracked.folder / METRICS_FILE, tracked.resumed_step), *trackers]


def _number(name: str, value: SupportsFloat | None) -> float | int | None:
    """Convert a number of torch or NumPy to Python's int or float, which JSON can represent."""
    if value is None:
        return None
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"metrics: {name} is not a number: {value!r:.80}; leave it out, or write its mean"
        ) from error
