"""Commands, from the command line to the exit code, and sweeps (-m)."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from gpipe_hpc.config import commands, compose_config, conf_dir, print_error, run_jobs
from gpipe_hpc.config.commands import ChildLauncher, exit_code_of, without_launcher
from gpipe_hpc.draw.__main__ import main as draw
from gpipe_hpc.errors import ConfigError, DataError, ModelError, PeerError, ScheduleError
from gpipe_hpc.trainer import command
from gpipe_hpc.trainer.command import run_command
from gpipe_hpc.trainer.signals import StopRequest
from tests.support import losses


@pytest.fixture
def set_argv(monkeypatch, tmp_path):
    """Return a function that sets `sys.argv`; the working directory is an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: monkeypatch.setattr(sys, "argv", ["prog", *words])


def exit_code(main, *arguments):
    with pytest.raises(SystemExit) as left:
        main(*arguments)
    return left.value.code


def use_conf_folder(monkeypatch, folder, is_own):
    """Use a conf folder in place of the package's own, or name it by GPIPE_HPC_CONF."""
    if is_own:
        monkeypatch.setattr(commands, "conf_dir", lambda: folder)
    else:
        monkeypatch.setenv("GPIPE_HPC_CONF", str(folder))


own_or_users = pytest.mark.parametrize("is_own", [True, False], ids=["edited", "another"])


@own_or_users
def test_hydra_section_of_changed_conf_folder_is_applied(set_argv, monkeypatch, tmp_path, is_own):
    """Regression: the fast path for a single job ignored an edited `hydra:` section."""
    shutil.copytree(conf_dir(), tmp_path / "conf")
    path = tmp_path / "conf" / "config.yaml"
    text = path.read_text("utf-8")
    assert text.count("    chdir: false\n") == 1
    changed = "    chdir: false\n    env_set: {GPIPE_HPC_NEW: '1'}\n"
    path.write_text(text.replace("    chdir: false\n", changed), "utf-8")
    use_conf_folder(monkeypatch, tmp_path / "conf", is_own)
    monkeypatch.delenv("GPIPE_HPC_NEW", raising=False)
    seen = []
    set_argv("pipeline.stages=3")
    assert run_jobs(lambda job: seen.append(os.environ.get("GPIPE_HPC_NEW")) or 0, "train") == 0
    assert seen == ["1"]


@own_or_users
def test_conf_folder_with_invalid_yaml_exits_with_code_2(
    set_argv, monkeypatch, capsys, tmp_path, is_own
):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    (tmp_path / "conf" / "config.yaml").write_text("hydra: [")
    use_conf_folder(monkeypatch, tmp_path / "conf", is_own)
    set_argv("pipeline.stages=3")
    assert run_jobs(pytest.fail, "train") == 2
    assert "config.yaml" in capsys.readouterr().err


def test_single_job_has_no_number(set_argv):
    set_argv("pipeline.stages=3")
    seen = []
    assert run_jobs(lambda job: seen.append(job) or 7, "train") == 7
    assert [(job.config.pipeline.stages, job.number) for job in seen] == [(3, None)]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model=mlp", "data=synthetic_vectors", "+model.extra=[1,2]", "~model.activation"],
        ["run.dir=runs/${train.steps}", "pipeline.partition=[5,6]", "train.steps=7"],
    ],
)
def test_single_job_has_the_same_settings_with_and_without_hydra(set_argv, words):
    """Hydra composes settings twice, so a single job uses it only for Hydra's own features."""
    found = []
    for more in ([], ["hydra.verbose=false"]):
        set_argv(*words, *more)
        assert run_jobs(lambda job: found.append(job) or 0, "train") == 0
    alone, by_hydra = found
    assert alone == by_hydra and alone.words == tuple(words)


def test_single_job_does_not_run_hydra_main(set_argv, monkeypatch):
    monkeypatch.delattr(commands.hydra, "main")
    set_argv("train.steps=7")
    assert run_jobs(lambda job: job.config.train.steps, "train") == 7


def test_sweep_runs_every_job_and_leaves_no_files(set_argv, tmp_path):
    set_argv("-m", "pipeline.stages=1,2", "train.steps=5")
    seen = []
    assert run_jobs(lambda job: seen.append(job) or 0, "train") == 0
    assert [(job.config.pipeline.stages, job.number) for job in seen] == [(1, 1), (2, 2)]
    assert all(job.config.train.steps == 5 for job in seen)
    assert not list(tmp_path.iterdir())


def test_failed_job_is_reported_and_the_others_run(set_argv, capsys):
    def task(job):
        if job.config.pipeline.stages == 2:
            raise ValueError("broken")
        return {1: 0, 3: 3, 4: 0}[job.config.pipeline.stages]

    set_argv("-m", "pipeline.stages=1,2,3,4", "train.steps=5")
    assert run_jobs(task, "train") == 1
    errors = capsys.readouterr().err
    assert "job 4 of 4 (pipeline.stages=4)" in errors and "ValueError: broken" in errors
    assert "job 2 of 4 (pipeline.stages=2) ended with exit code 1" in errors
    assert "job 3 of 4 (pipeline.stages=3) ended with exit code 3" in errors


def test_sweep_with_a_shared_output_folder_is_rejected(set_argv, capsys):
    set_argv("-m", "optimizer.lr=1,2", "run.dir=one")
    assert run_jobs(pytest.fail, "train", unshared="run.dir") == 2
    assert (
        "bad run.dir, expected a different value for each of the 2 jobs" in capsys.readouterr().err
    )
    set_argv("-m", "optimizer.lr=1,2", "run.dir=in_${optimizer.lr}")
    assert run_jobs(lambda job: 0, "train", unshared="run.dir") == 0


@pytest.mark.parametrize("words", [["train.step=1"], ["-m", "train.steps=1,x"], ["model=none"]])
def test_composition_error_exits_with_code_2(set_argv, words):
    set_argv(*words)
    assert run_jobs(pytest.fail, "train") == 2


def test_hydra_env_set_applies_during_jobs_only(set_argv, monkeypatch):
    monkeypatch.setenv("GPIPE_HPC_KEPT", "before")
    monkeypatch.delenv("GPIPE_HPC_NEW", raising=False)
    for words, names in ([[], [1]], [["-m", "train.steps=1,2"], [1, 2]]):
        set_argv(
            *words, "+hydra.job.env_set.GPIPE_HPC_KEPT=x", "+hydra.job.env_set.GPIPE_HPC_NEW=7"
        )
        seen = []

        def task(job, seen=seen):
            seen.append((os.environ["GPIPE_HPC_KEPT"], os.environ["GPIPE_HPC_NEW"]))
            return 0

        assert run_jobs(task, "train") == 0
        assert seen == [("x", "7")] * len(names)
        assert os.environ["GPIPE_HPC_KEPT"] == "before" and "GPIPE_HPC_NEW" not in os.environ


def test_hydra_chdir_is_rejected(set_argv, capsys):
    set_argv("hydra.job.chdir=true")
    assert run_jobs(pytest.fail, "train") == 2
    assert "bad hydra.job.chdir, expected false" in capsys.readouterr().err


def test_two_spellings_of_one_output_folder_are_rejected(set_argv):
    set_argv("-m", "run.dir=runs/a,runs/../runs/a")
    assert run_jobs(pytest.fail, "train", unshared="run.dir") == 2


def test_sweep_with_one_invalid_job_runs_no_job(set_argv):
    set_argv("-m", "data=python_source,synthetic_vectors")
    assert run_jobs(pytest.fail, "train") == 2


def test_launcher_that_runs_no_job_here_is_rejected(set_argv, monkeypatch, capsys):
    monkeypatch.setattr(commands.hydra, "main", lambda **_: lambda task: lambda: None)
    set_argv("-m", "pipeline.stages=1,2")
    assert run_jobs(pytest.fail, "train") == 2
    assert "hydra/launcher returned no jobs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "launcher", "left"),
    [
        (["-m", "a=1,2", "hydra/launcher=submitit_slurm"], "submitit_slurm", ["-m", "a=1,2"]),
        (
            ["hydra.launcher.nodes=2", "hydra/launcher=x", "--multirun", "++hydra.launcher.qos=q"],
            "x",
            ["--multirun"],
        ),
        (["-m", "hydra/launcher=x", "hydra/launcher=basic"], None, ["-m"]),
        (["hydra/launcher=x"], None, []),  # a single job
    ],
)
def test_launcher_overrides_are_found_and_removed(words, launcher, left):
    assert commands._other_launcher(words) == launcher
    assert without_launcher(words) == left


@pytest.fixture
def remote_launcher(monkeypatch, tmp_path):
    """Return a function that installs a fake launcher, which writes exit codes and may fail."""
    calls = []

    def launch(codes, failure=None):
        first = commands.hydra.main
        monkeypatch.chdir(tmp_path)

        def main(**options):
            def decorate(task):
                if not isinstance(task, ChildLauncher):
                    return first(**options)(task)
                (folder,) = (w.partition("=")[2] for w in sys.argv if "hydra.sweep.dir" in w)
                calls.append(sys.argv)

                def call():
                    Path(folder).mkdir(parents=True)
                    for number, code in codes.items():
                        (Path(folder) / f"{number}.code").write_text(f"{code}\n")
                    if failure is not None:
                        raise failure

                return call

            return decorate

        monkeypatch.setattr(commands.hydra, "main", main)
        return calls

    return launch


SWEEP = ("-m", "pipeline.stages=1,2", "hydra/launcher=other", "hydra.launcher.nodes=3")


@pytest.mark.parametrize(
    ("codes", "failure", "code", "messages"),
    [
        ({0: 0, 1: 0}, None, 0, []),
        ({0: 0, 1: 2}, None, 2, ["job 2 of 2 (pipeline.stages=2) ended with exit code 2"]),
        (
            {1: 75},
            RuntimeError("job 0 is gone"),
            1,
            [
                "job 1 of 2 (pipeline.stages=1) was killed",
                "job 2 of 2 (pipeline.stages=2) ended with exit code 75",
            ],
        ),
        ({}, RuntimeError("no sbatch"), 2, ["ran no job", "RuntimeError: no sbatch"]),
    ],
)
def test_exit_codes_of_remote_jobs_are_reported(
    set_argv, remote_launcher, capsys, codes, failure, code, messages
):
    (calls,) = [remote_launcher(codes, failure)]
    set_argv(*SWEEP)
    assert run_jobs(pytest.fail, "train") == code
    errors = capsys.readouterr().err
    assert all(each in errors for each in messages)
    assert errors.count("ended") == sum("ended" in each for each in messages)
    assert calls[0][1:5] == list(SWEEP)


def test_remote_sweep_is_rejected_before_any_job_runs(set_argv, remote_launcher, capsys):
    calls = remote_launcher({0: 0, 1: 0})
    set_argv(*SWEEP, "run.dir=runs/same")
    assert run_jobs(pytest.fail, "train", unshared="run.dir") == 2
    assert "bad run.dir" in capsys.readouterr().err and not calls


def test_exit_code_is_2_for_invalid_settings_and_1_for_other_errors():
    assert exit_code_of(ConfigError("a")) == exit_code_of(ScheduleError("b")) == 2
    assert exit_code_of(DataError("c")) == exit_code_of(OSError("d")) == 1


def test_peer_error_has_the_exit_code_of_the_failed_rank():
    """Regression: one rank exited with 2 and all others with 1, which a script took for a crash."""
    message = "rank 1 on vm: train.device: ranks 0 and 1 use the same device, cuda:0"
    assert exit_code_of(PeerError(message, is_mistake=True)) == 2
    assert exit_code_of(PeerError(message)) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["pipeline.options.foo=1"],
        ["pipeline.schedule=chimera"],
        ["data=text", "data.paths=[nowhere/*]"],
        ["data=idx", "data.path=nowhere", "model=mlp"],
        ["checkpoint.resume=nowhere"],
    ],
)
def test_training_that_cannot_start_exits_with_code_2(set_argv, tiny, words):
    set_argv(*tiny, "run.dir=run", "train.keep_freed_memory=false", *words)
    assert exit_code(run_command, StopRequest()) == 2


def test_invalid_drawing_settings_exit_with_code_2(set_argv):
    set_argv("draw.format=pdf")
    assert exit_code(draw) == 2
    set_argv("-m", "draw.format=text,svg", "draw.out=one")
    assert exit_code(draw) == 2


def test_signal_ends_a_sweep_whose_jobs_have_their_own_folders(set_argv, monkeypatch):
    stop, folders = StopRequest(), []

    def train(config, world, stop, doubts, words):
        assert f"optimizer.lr={len(folders) + 1}" in words
        folders.append(config.run.dir)
        if len(folders) == 2:
            stop.signal = 15
        return 75 if stop.is_requested else 0

    monkeypatch.setattr(command, "run_training", train)
    monkeypatch.setattr(command, "end_soon", sys.exit)  # so that the test process goes on
    set_argv("-m", "optimizer.lr=1,2,3", "train.keep_freed_memory=false")
    assert exit_code(run_command, stop) == 75
    assert len(folders) == 2 and folders[0].startswith("runs/")
    assert [folder.rpartition("/")[2] for folder in folders] == ["1", "2"]


@pytest.mark.parametrize(("is_mistake", "code"), [(True, 2), (False, 75)])
def test_terminated_rank_keeps_the_exit_code_of_a_peers_user_error(
    set_argv, monkeypatch, is_mistake, code
):
    """Otherwise Slurm, which takes the highest code of all ranks, would see 75 and requeue."""
    stop = StopRequest()

    def train(*_):
        monkeypatch.setattr(StopRequest, "was_terminated", True)
        raise PeerError("rank 1 on vm: what it is", is_mistake=is_mistake)

    monkeypatch.setattr(command, "run_training", train)
    monkeypatch.setattr(command, "end_soon", sys.exit)  # so that the test process goes on
    set_argv("train.keep_freed_memory=false")
    assert exit_code(run_command, stop) == code


@pytest.mark.slow
def test_sweep_job_trains_like_a_single_run(start, tiny, tmp_path):
    settings = (*tiny, "train.steps=2", "model.dropout=0.1", "lr.warmup_steps=0")
    swept = start("-m", *settings, "optimizer.lr=1e-3,1e-2", "run.dir=of/${optimizer.lr}")
    alone = start(*settings, "optimizer.lr=1e-2", "run.dir=alone")
    assert swept.wait(60).code == alone.wait(60).code == 0, swept.output
    assert losses(tmp_path / "of" / "0.01") == losses(tmp_path / "alone")
    assert losses(tmp_path / "of" / "0.001") != losses(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"of", "alone"}


@pytest.mark.slow
def test_sweep_under_a_launcher_is_rejected(start_ranks, tiny):
    """Otherwise job 2 would reuse the connections of job 1, whatever its own settings."""
    ranks = start_ranks(2, "-m", *tiny, "optimizer.lr=1,2").wait(60)
    assert ranks.codes == [2, 2]
    assert all("the launcher has started 2; launch" in x for x in ranks.outputs)


REFERRING = [p for p in sorted(conf_dir().glob("model/*.yaml")) if "${data." in p.read_text()]
DIFFERENT = ("resnet_small", "gpt", "unet", "vgg16")  # each needs other data


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in DIFFERENT else pytest.mark.slow, id=path.stem)
        for path in REFERRING
    ],
)
def test_model_without_matching_data_error_names_matching_data(path):
    """Regression: the error for model=resnet_small named the data of an MLP and a VGG."""
    other = "synthetic" if "data.num_classes" in path.read_text() else "synthetic_vectors"
    with pytest.raises(ConfigError, match=f"model={path.stem} goes with data=") as refusal:
        compose_config([f"model={path.stem}", f"data={other}", "train.steps=1"])
    named = str(refusal.value).partition("goes with data=")[2].partition(")")[0]
    compose_config([f"model={path.stem}", f"data={named}"])
    if path.stem == "resnet_small":
        assert named == "digits"


def test_error_message_has_the_public_class_name(capsys):
    """Regression: a run printed `_LossError: ...`, a private name."""

    class _Inner(ModelError):
        pass

    assert print_error(_Inner("loss: failed"), says_kind=True) == 2
    assert capsys.readouterr().err == "gpipe_hpc: ModelError: loss: failed\n"


def test_keyboard_interrupt_prints_one_line(set_argv, capsys):
    """Regression: `plan` and `verify` printed an internal traceback."""

    def task(job):
        raise KeyboardInterrupt

    set_argv()
    assert run_jobs(task, "plan") == 130
    assert capsys.readouterr().err == "\ngpipe_hpc: interrupted\n"
