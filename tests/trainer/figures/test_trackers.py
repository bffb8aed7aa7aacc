"""Weights & Biases and MLflow beside metrics.jsonl: what they are told, and when they fail.

Small packages of the same names stand for theirs and note each call, in the forms that wandb 0.31
and mlflow 3.17 take.
"""

import json
import sys
from textwrap import dedent

import pytest

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.figures import trackers
from gpipe_hpc.trainer.figures.metrics import open_metrics
from tests.support import choices_of

WANDB = """
    calls = []

    class Run:
        def __init__(self, given):
            self.id = given["id"] or f"new{len(calls)}"

        def define_metric(self, name, step_metric):
            calls.append(("axis", name, step_metric))

        def log(self, row):
            calls.append(("log", row))
            if row.get("loss") == 13.0:
                raise OSError("the line is cut")

        def finish(self, exit_code=None):
            calls.append(("finish", exit_code))

    def init(**given):
        if given["project"] == "none of mine":
            raise PermissionError("no API key")
        calls.append(("init", given))
        return Run(given)
"""

MLFLOW = """
    calls = []

    def flush_async_logging():
        calls.append(("flush",))
"""

MLFLOW_TRACKING = """
    from types import SimpleNamespace
    from mlflow import calls

    class MlflowClient:
        def __init__(self, tracking_uri=None):
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name):
            made = [each for each in calls if each[0] == "experiment"]
            return SimpleNamespace(experiment_id="e1") if made else None

        def create_experiment(self, name, artifact_location=None):
            calls.append(("experiment", name, artifact_location))
            return "e1"

        def create_run(self, experiment, run_name):
            calls.append(("run", experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id=f"r{len(calls)}"))

        def update_run(self, run_id, status):
            calls.append(("status", run_id, status))

        def log_param(self, run_id, name, value):
            calls.append(("param", name, value))

        def log_batch(self, run_id, metrics, synchronous):
            calls.append(("batch", run_id, metrics, synchronous))

        def set_terminated(self, run_id, status=None):
            calls.append(("end", run_id, status))
"""

MLFLOW_ENTITIES = """
    from typing import NamedTuple

    class Metric(NamedTuple):
        key: str
        value: float
        timestamp: int
        step: int
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put the packages where Python finds them; return what loads one and tells its calls."""
    there = tmp_path / "installed"
    files = {
        "wandb.py": WANDB,
        "mlflow/__init__.py": MLFLOW,
        "mlflow/tracking.py": MLFLOW_TRACKING,
        "mlflow/entities.py": MLFLOW_ENTITIES,
    }
    for name, text in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(dedent(text))
    monkeypatch.syspath_prepend(there)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    names = ("wandb", "mlflow", "mlflow.tracking", "mlflow.entities")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda name: sys.modules[name].calls
    for name in names:
        sys.modules.pop(name, None)


def test_settings_and_writers_know_the_same_trackers():
    assert set(choices_of(Config, "metrics.to")) == {"tensorboard", *trackers._FOREIGN}


def test_wandb_is_told_each_step_and_goes_on_in_its_run(tmp_path, installed, monkeypatch):
    """A run that resumes is the same run there; one that starts over is another."""
    folder = tmp_path / "run"
    monkeypatch.setenv("WANDB_PROJECT", "p")
    with open_metrics(folder, to=["wandb"], settings={"a.b": 1}) as metrics:
        metrics.write(1, {"loss": 2.0, "bubble": None})
        metrics.write(1, {"validation_loss": 3.0})
    calls = installed("wandb")
    (_, given), axis, *logged, end = calls
    assert given["project"] == "p" and given["name"] == "run" and given["dir"] == folder
    assert given["config"] == {"a.b": 1} and given["id"] is None
    assert axis == ("axis", "*", "step") and end == ("finish", 0)
    assert logged == [
        ("log", {"step": 1, "loss": 2.0}),
        ("log", {"step": 1, "validation_loss": 3.0}),
    ]
    assert not (folder / "tensorboard").exists()
    first = json.loads((folder / "trackers.json").read_text())["wandb"]
    for resumed, known in ((1, first), (None, first), (0, None)):
        calls.clear()
        open_metrics(folder, resumed, to=["wandb"]).close()
        assert calls[0][1]["id"] == known
        assert calls[0][1]["resume"] == (None if known is None else "allow")


def test_mlflow_is_told_each_step_and_keeps_its_file_in_the_run_folder(
    tmp_path, installed, monkeypatch
):
    folder = tmp_path / "run"
    for resumed in (0, 1):
        with open_metrics(
            folder, resumed, to=["mlflow", "tensorboard"], settings={"a": 1}
        ) as metrics:
            metrics.write(resumed + 1, {"loss": 2.0, "bubble": None})
    calls = installed("mlflow")
    assert ("client", f"sqlite:///{folder}/mlflow.db") in calls
    assert ("experiment", "gpipe_hpc", (folder / "mlflow").as_uri()) in calls
    assert calls.count(("param", "a", "1")) == 1, "told where a run begins"
    batches = [each for each in calls if each[0] == "batch"]
    assert len({run_id for _, run_id, *_ in batches}) == 1, "the second start went on there"
    assert [[(m.key, m.value, m.step) for m in rows] for *_, rows, _ in batches] == [
        [("loss", 2.0, 1)],
        [("loss", 2.0, 2)],
    ]
    assert [synchronous for *_, synchronous in batches] == [False, False]
    assert calls[-2:] == [("flush",), ("end", batches[0][1], "FINISHED")]
    assert (folder / "tensorboard").is_dir()
    assert [each for each in calls if each[0] == "status"] == [("status", batches[0][1], "RUNNING")]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    calls.clear()
    open_metrics(folder, 0, to=["mlflow"]).close()
    assert calls[0] == ("client", None), "its own variable says where"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (ValueError("a bad step"), 1, "FAILED"),
        (KeyboardInterrupt(), 130, "KILLED"),
        (SystemExit(3), 3, "FAILED"),
        (SystemExit(), 0, "FINISHED"),
    ],
    ids=["an error", "Ctrl-C", "an exit", "an exit without an error"],
)
def test_trackers_know_of_a_run_that_an_error_has_ended(tmp_path, installed, error, code, status):
    """It was shown as finished."""
    with pytest.raises(type(error)), open_metrics(tmp_path, to=["wandb", "mlflow"]) as metrics:
        metrics.write(1, {"loss": 2.0})
        raise error
    assert installed("wandb")[-1] == ("finish", code)
    assert installed("mlflow")[-1][2] == status


def test_a_tracker_that_fails_in_mid_run_is_told_once_and_ends_no_run(tmp_path, installed, caplog):
    with open_metrics(tmp_path, to=["wandb"]) as metrics:
        for step in range(1, 5):
            metrics.write(step, {"loss": 13.0 if step > 1 else 1.0})
    assert len([each for each in installed("wandb") if each[0] == "log"]) == 2
    (warning,) = caplog.records
    assert "wandb stopped accepting" in warning.message and "the line is cut" in warning.message
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_tracker_that_does_not_open_is_an_error_with_its_own_words(
    tmp_path, installed, monkeypatch
):
    monkeypatch.setenv("WANDB_PROJECT", "none of mine")
    with pytest.raises(ConfigError, match="PermissionError: no API key; fix this"):
        open_metrics(tmp_path, to=["wandb"])


def test_a_tracker_that_is_not_there_is_refused(tmp_path, monkeypatch):
    """A folder `mlflow`, as a run leaves one, was taken for the package."""
    find = trackers.find_spec
    (tmp_path / "here" / "mlflow").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "here")])
    assert find("mlflow") is not None
    with pytest.raises(ConfigError, match="pip install mlflow, or remove it"):
        open_metrics(tmp_path, to=["mlflow"])
    with pytest.raises(ConfigError, match="expected one of tensorboard, wandb, mlflow"):
        open_metrics(tmp_path, to=["tensorbord"])
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("to", "said"), [("[tensorbord]", "did you mean"), ("[wandb,wandb]", "each tracker once")]
)
def test_settings_that_name_no_tracker_are_refused(to, said):
    with pytest.raises(ConfigError, match=f"bad metrics.to.*{said}"):
        check_config(compose_config([f"metrics.to={to}"]), 1)
