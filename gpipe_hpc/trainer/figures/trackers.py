"""Experiment trackers for the metrics of a run: TensorBoard, Weights & Biases, MLflow.

The last two are imported only if they are requested. They are configured by their own environment
variables (WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME).
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Config, settings_of
from gpipe_hpc.small_files import read_json
from gpipe_hpc.trainer.writers import MetricsWriter, Scalars, TensorBoard

_PROJECT: Final = "gpipe_hpc"
IDS_FILE: Final = "trackers.json"
"""File with the run's id in each tracker, so that a resumed run continues there."""

_DONE: Final = 0
_FAILED: Final = 1
_INTERRUPTED: Final = 130

log = logging.getLogger("gpipe_hpc.train")


class TrackedRun(NamedTuple):
    """A run to record in trackers: its folder, its settings, and the step from which it resumes.

    `resumed_step`: see `JsonLines`.
    """

    folder: Path
    resumed_step: int | None
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the run's name, which is that of its folder."""
        return self.folder.resolve().name

    def known_id(self, tracker: str) -> str | None:
        """Return the id that a tracker gave the run; None if the run is new or starts over."""
        return None if self.resumed_step == 0 else _ids(self.folder).get(tracker)

    def keep_id(self, tracker: str, run_id: str) -> None:
        """Store the id that a tracker gave the run in the run folder."""
        path = self.folder / IDS_FILE
        aside = path.with_name(path.name + ".part")
        aside.write_text(json.dumps(_ids(self.folder) | {tracker: run_id}) + "\n", "utf-8")
        os.replace(aside, path)


def _ids(folder: Path) -> dict[str, str]:
    try:
        told = read_json(folder / IDS_FILE)
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in told.items() if isinstance(v, str)} if isinstance(told, dict) else {}


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code for an error that ended a run; 0 if there is none."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return _DONE if error is None else _FAILED


class WeightsAndBiases:
    """Writer of scalars to a Weights & Biases run, plotted over the step."""

    def __init__(self, tracked: TrackedRun) -> None:
        known = tracked.known_id("wandb")
        self._run: Any = import_module("wandb").init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=tracked.name,
            dir=tracked.folder,
            config=dict(tracked.settings),
            id=known,
            resume=None if known is None else "allow",
        )
        # Steps repeated after a restart are shown at their step, not at the end.
        self._run.define_metric("*", step_metric="step")
        tracked.keep_id("wandb", str(self._run.id))

    def write(self, step: int, scalars: Scalars) -> None:
        """Log the scalars that have a value; the library sends them from its own process."""
        self._run.log({"step": step, **{k: v for k, v in scalars.items() if v is not None}})

    def close(self, error: BaseException | None = None) -> None:
        """Wait until pending data is sent, and report the outcome of the run."""
        self._run.finish(exit_code=exit_code_of(error))


class MLflow:
    """Writer of scalars to an MLflow run, on the server MLFLOW_TRACKING_URI or in a local file."""

    def __init__(self, tracked: TrackedRun) -> None:
        client = import_module("mlflow.tracking").MlflowClient
        self._metric: Any = import_module("mlflow.entities").Metric
        if os.environ.get("MLFLOW_TRACKING_URI"):
            self._client, kept = client(), None
        else:
            folder = tracked.folder.resolve()
            self._client = client(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
            kept = (folder / "mlflow").as_uri()
        known = tracked.known_id("mlflow")
        if known is not None:
            self._client.update_run(known, status="RUNNING")
        self._run_id = known or self._begin(tracked, kept)
        tracked.keep_id("mlflow", self._run_id)

    def _begin(self, tracked: TrackedRun, kept: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        there = self._client.get_experiment_by_name(name)
        experiment = (
            self._client.create_experiment(name, artifact_location=kept)
            if there is None
            else there.experiment_id
        )
        run_id = str(self._client.create_run(experiment, run_name=tracked.name).info.run_id)
        for setting, value in tracked.settings.items():
            self._client.log_param(run_id, setting, str(value)[:500])
        return run_id

    def write(self, step: int, scalars: Scalars) -> None:
        """Log the scalars that have a value; a thread of the library sends them."""
        now_ms = int(1e3 * time.time())
        rows = [self._metric(k, v, now_ms, step) for k, v in scalars.items() if v is not None]
        self._client.log_batch(self._run_id, metrics=rows, synchronous=False)

    def close(self, error: BaseException | None = None) -> None:
        """Wait until pending data is sent, and report the outcome of the run."""
        import_module("mlflow").flush_async_logging()
        statuses = {_DONE: "FINISHED", _INTERRUPTED: "KILLED"}
        status = statuses.get(exit_code_of(error), "FAILED")
        self._client.set_terminated(self._run_id, status=status)


class GuardedWriter:
    """Wrapper of an external writer that ignores it after its first error, which is logged."""

    def __init__(self, name: str, writer: MetricsWriter) -> None:
        self._name, self._writer = name, writer
        self._is_lost = False

    def write(self, step: int, scalars: Scalars) -> None:
        """Pass the scalars on, unless the writer has failed before."""
        self._attempt(lambda: self._writer.write(step, scalars))

    def close(self, error: BaseException | None = None) -> None:
        """Close the writer, unless it has failed before."""
        self._attempt(lambda: self._writer.close(error))

    def _attempt(self, act: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except Exception as error:  # an error of a tracker must not end a training run
            self._is_lost = True
            log.warning(
                "%s stopped accepting metrics of this run (%s: %s); metrics.jsonl has them all",
                self._name,
                type(error).__name__,
                str(error)[:300],
            )


_FOREIGN: Final[Mapping[str, Callable[[TrackedRun], MetricsWriter]]] = MappingProxyType(
    {"wandb": WeightsAndBiases, "mlflow": MLflow}
)


def refuse_missing(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown or not installed."""
    settings = {each.name: each for each in settings_of(Config)}
    for name in names:
        settings["metrics.to"].check(name)
        if name in _FOREIGN and not _is_installed(name):
            raise ConfigError(
                f"metrics.to: {name} is not installed; pip install {name}, or remove it from "
                "metrics.to"
            )


def _is_installed(name: str) -> bool:
    """Return whether a package is installed; an empty folder of its name does not count."""
    found = find_spec(name)
    return found is not None and found.origin is not None


def open_trackers(names: Sequence[str], tracked: TrackedRun) -> list[MetricsWriter]:
    """Return a writer for each tracker; raise ConfigError if one cannot be opened."""
    refuse_missing(names)
    tracked.folder.mkdir(parents=True, exist_ok=True)
    return [_opened(name, tracked) for name in names]


def _opened(name: str, tracked: TrackedRun) -> MetricsWriter:
    if name == "tensorboard":
        return TensorBoard(tracked.folder / name, tracked.resumed_step)
    try:
        return GuardedWriter(name, _FOREIGN[name](tracked))
    except Exception as error:  # no account, no server, an incompatible version
        raise ConfigError(
            f"metrics: {name} cannot be opened for this run: "
            f"{type(error).__name__}: {str(error)[:500]}; fix this, or remove {name} from "
            f"metrics.to"
        ) from error
