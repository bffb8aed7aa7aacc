"""The folder of a run that is refused before its first step."""

from pathlib import Path

import pytest

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import ActionError, ConfigError, GpipeError, NonFiniteError
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.run.opening import begin, own_folder
from gpipe_hpc.trainer.signals import StopRequest


def failing(folder, error):
    """Take the folder of a run, write into it, and fail."""
    config = compose_config() if folder is None else compose_config([f"run.dir={folder}"])
    with pytest.raises(type(error)), own_folder(config, StopRequest()) as lock:
        (lock.folder / "config.yaml").write_text("model: gpt")
        raise error


def test_a_refused_start_leaves_nothing_of_what_it_made(tmp_path, monkeypatch):
    """An empty runs/ stayed, and of a named folder the settings that had been refused."""
    monkeypatch.chdir(tmp_path)
    failing(None, ConfigError("no"))
    failing("made/for/it", ConfigError("no"))
    assert not list(Path().iterdir())


def test_what_was_there_before_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    failing(tmp_path / "mine" / "run", ConfigError("no"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
    failing(tmp_path / "mine", ConfigError("no"))
    assert (tmp_path / "mine" / "notes").exists()


def test_a_named_folder_of_a_run_that_failed_stays_with_its_log(tmp_path):
    failing(tmp_path / "run", ActionError("a layer failed"))
    assert (tmp_path / "run" / "config.yaml").exists()


def start(folder, *words, error=None):
    """Begin a run in its folder, as rank 0 does, and maybe fail; return its settings' file."""
    config = compose_config([f"run.dir={folder}", *words])
    with own_folder(config, StopRequest()) as lock:
        begin(config, lock)
        if error is not None:
            raise error
    return (folder / "config.yaml").read_text()


def test_a_run_that_came_to_nan_is_not_started_again_as_it_was(tmp_path, monkeypatch):
    """torchrun, Kubernetes and Docker started it up to a hundred times, each to the same step."""
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError):
        start(run, error=NonFiniteError("step 7: got nan"))
    refused = pytest.raises(
        NonFiniteError, match=r"remove .*/NON_FINITE to .* reported: step 7: got"
    )
    for _ in range(2):
        with refused:
            start(run)
    assert "lr: 0.5" in start(run, "optimizer.lr=0.5", "checkpoint.resume=never")
    with pytest.raises(NonFiniteError):  # the mark is gone
        start(run, "checkpoint.resume=never", error=NonFiniteError("step 8: got inf"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(NonFiniteError, match="reported: step 8: got inf"):
        start(run, "checkpoint.resume=never")


@pytest.mark.parametrize(
    "changed", ["train.device=cpu", "train.deterministic=true", "checkpoint.resume=older"]
)
def test_any_changed_setting_is_none_that_came_to_nan(tmp_path, monkeypatch, changed):
    """These were refused, and told that they were the same."""
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError):
        start(run, error=NonFiniteError("step 7: got nan"))
    if changed.startswith("checkpoint"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start(run, changed)
    assert not (run / "NON_FINITE").exists()


def test_a_mark_that_cannot_be_read_is_told(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError):
        start(run, error=NonFiniteError("step 7: got nan"))
    (run / "NON_FINITE").write_bytes(b"\xff\n")
    start(run)
    (run / "NON_FINITE").mkdir()
    with pytest.raises(ConfigError, match="NON_FINITE"):
        start(run)


@pytest.mark.parametrize("how", ["by hand", "removed"])
def test_a_user_may_try_the_same_again(tmp_path, how):
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError):
        start(run, error=NonFiniteError("step 7: got nan"))
    if how == "removed":
        (run / "NON_FINITE").unlink()
    start(run, *(["checkpoint.resume=never"] if how == "by hand" else []))
    assert not (run / "NON_FINITE").exists()


def test_a_run_that_failed_otherwise_may_be_started_again(tmp_path):
    with pytest.raises(ActionError):
        start(tmp_path / "run", error=ActionError("a layer failed"))
    start(tmp_path / "run")


@pytest.mark.parametrize("kind", [NonFiniteError, ConfigError])
def test_what_rank_0_refuses_all_ranks_refuse(tmp_path, kind):
    """They had only heard that it had failed, and ended with code 1 beside its 4 or 2."""
    run = tmp_path / "run"
    if kind is NonFiniteError:
        with pytest.raises(NonFiniteError):
            start(run, error=NonFiniteError("step 7: got nan"))
    else:
        run.write_text("a file")

    config = compose_config([f"run.dir={run}"])

    def refused(world):
        with pytest.raises(GpipeError) as caught:
            run_training(config, world, StopRequest())
        return caught.type, str(run) in str(caught.value)

    assert run_on_threads(3, refused) == [(kind, True)] * 3
