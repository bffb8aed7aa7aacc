"""From the command line to the exit code, and sweeps (-m) of the commands."""

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
def say(monkeypatch, tmp_path):
    """Return a function that sets the command line; the working directory is an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: monkeypatch.setattr(sys, "argv", ["prog", *words])


def exit_code(main, *arguments):
    with pytest.raises(SystemExit) as left:
        main(*arguments)
    return left.value.code


def test_what_a_checkout_tells_hydra_is_heeded(say, monkeypatch, tmp_path):
    """The shorter way, for one job alone, passed over a `hydra:` section that somebody edits."""
    assert not commands._concerns_hydra(["pipeline.stages=3"]), "the package's own takes it"
    shutil.copytree(conf_dir(), tmp_path / "conf")
    own = tmp_path / "conf" / "config.yaml"
    text = own.read_text()
    own.write_text(text.replace("chdir: false", "chdir: false\n    env_set: {TOLD: '1'}"))
    assert own.read_text() != text
    monkeypatch.setattr(commands, "conf_dir", lambda: tmp_path / "conf")
    seen = []
    say("pipeline.stages=3")
    assert run_jobs(lambda job: seen.append(os.environ.get("TOLD")) or 0, "train") == 0
    assert seen == ["1"]
    own.write_text("hydra: [")
    assert commands._concerns_hydra(["pipeline.stages=3"]), "it says what is no YAML"


def test_one_job_has_no_number(say):
    say("pipeline.stages=3")
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
def test_one_job_has_the_settings_that_hydras_command_line_gives(say, words):
    """Which composes all of them twice, so it is asked only for what Hydra alone does."""
    found = []
    for more in ([], ["hydra.verbose=false"]):
        say(*words, *more)
        assert run_jobs(lambda job: found.append(job) or 0, "train") == 0
    alone, by_hydra = found
    assert alone == by_hydra and alone.words == tuple(words)


def test_where_hydra_has_nothing_else_to_do_settings_are_composed_once(say, monkeypatch):
    monkeypatch.delattr(commands.hydra, "main")
    say("train.steps=7")
    assert run_jobs(lambda job: job.config.train.steps, "train") == 7


def test_settings_of_another_folder_may_tell_hydra_more(say, monkeypatch, tmp_path):
    """As it is done there for a job of a sweep, too."""
    shutil.copytree(conf_dir(), tmp_path / "conf")
    path = tmp_path / "conf" / "config.yaml"
    text = path.read_text("utf-8")
    assert text.count("    chdir: false\n") == 1
    own = "    chdir: false\n    env_set:\n      GPIPE_HPC_NEW: x\n"
    path.write_text(text.replace("    chdir: false\n", own), "utf-8")
    monkeypatch.setenv("GPIPE_HPC_CONF", str(tmp_path / "conf"))
    say("train.steps=7")
    assert run_jobs(lambda job: int(os.environ["GPIPE_HPC_NEW"] == "x"), "train") == 1


def test_a_sweep_runs_every_job_and_leaves_nothing_behind(say, tmp_path):
    say("-m", "pipeline.stages=1,2", "train.steps=5")
    seen = []
    assert run_jobs(lambda job: seen.append(job) or 0, "train") == 0
    assert [(job.config.pipeline.stages, job.number) for job in seen] == [(1, 1), (2, 2)]
    assert all(job.config.train.steps == 5 for job in seen)
    assert not list(tmp_path.iterdir())


def test_a_job_that_fails_is_told_and_the_others_run(say, capsys):
    def task(job):
        if job.config.pipeline.stages == 2:
            raise ValueError("broken")
        return {1: 0, 3: 3, 4: 0}[job.config.pipeline.stages]

    say("-m", "pipeline.stages=1,2,3,4", "train.steps=5")
    assert run_jobs(task, "train") == 1
    told = capsys.readouterr().err
    assert "job 4 of 4 (pipeline.stages=4)" in told and "ValueError: broken" in told
    assert "job 2 of 4 (pipeline.stages=2) ended with exit code 1" in told
    assert "job 3 of 4 (pipeline.stages=3) ended with exit code 3" in told


def test_jobs_that_would_write_over_one_another_are_refused_before_any_runs(say, capsys):
    say("-m", "optimizer.lr=1,2", "run.dir=one")
    assert run_jobs(pytest.fail, "train", unshared="run.dir") == 2
    assert "bad run.dir, expected another for each of the 2 jobs" in capsys.readouterr().err
    say("-m", "optimizer.lr=1,2", "run.dir=in_${optimizer.lr}")
    assert run_jobs(lambda job: 0, "train", unshared="run.dir") == 0


@pytest.mark.parametrize("words", [["train.step=1"], ["-m", "train.steps=1,x"], ["model=none"]])
def test_what_cannot_be_composed_ends_with_code_2(say, words):
    say(*words)
    assert run_jobs(pytest.fail, "train") == 2


def test_jobs_have_the_environment_that_hydra_is_told_to_set(say, monkeypatch):
    monkeypatch.setenv("GPIPE_HPC_KEPT", "before")
    monkeypatch.delenv("GPIPE_HPC_NEW", raising=False)
    for words, names in ([[], [1]], [["-m", "train.steps=1,2"], [1, 2]]):
        say(*words, "+hydra.job.env_set.GPIPE_HPC_KEPT=x", "+hydra.job.env_set.GPIPE_HPC_NEW=7")
        seen = []

        def task(job, seen=seen):
            seen.append((os.environ["GPIPE_HPC_KEPT"], os.environ["GPIPE_HPC_NEW"]))
            return 0

        assert run_jobs(task, "train") == 0
        assert seen == [("x", "7")] * len(names)
        assert os.environ["GPIPE_HPC_KEPT"] == "before" and "GPIPE_HPC_NEW" not in os.environ


def test_what_hydra_would_do_around_a_job_is_refused(say, capsys):
    say("hydra.job.chdir=true")
    assert run_jobs(pytest.fail, "train") == 2
    assert "bad hydra.job.chdir, expected false" in capsys.readouterr().err


def test_two_spellings_of_one_folder_are_one(say):
    say("-m", "run.dir=runs/a,runs/../runs/a")
    assert run_jobs(pytest.fail, "train", unshared="run.dir") == 2


def test_a_sweep_of_which_one_job_cannot_work_is_refused_whole(say):
    say("-m", "data=python_source,synthetic_vectors")
    assert run_jobs(pytest.fail, "train") == 2


def test_a_launcher_that_takes_jobs_elsewhere_is_refused(say, monkeypatch, capsys):
    monkeypatch.setattr(commands.hydra, "main", lambda **_: lambda task: lambda: None)
    say("-m", "pipeline.stages=1,2")
    assert run_jobs(pytest.fail, "train") == 2
    assert "bad hydra/launcher" in capsys.readouterr().err


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
        (["hydra/launcher=x"], None, []),  # of one job
    ],
)
def test_the_launcher_of_a_sweep_is_found_and_left_out_where_jobs_are_composed(
    words, launcher, left
):
    assert commands._other_launcher(words) == launcher
    assert without_launcher(words) == left


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Return a function that stands in for a launcher: it leaves exit codes, and maybe fails."""
    given = []

    def launch(codes, failure=None):
        first = commands.hydra.main
        monkeypatch.chdir(tmp_path)

        def main(**options):
            def decorate(task):
                if not isinstance(task, ChildLauncher):
                    return first(**options)(task)
                (folder,) = (w.partition("=")[2] for w in sys.argv if "hydra.sweep.dir" in w)
                given.append(sys.argv)

                def call():
                    Path(folder).mkdir(parents=True)
                    for number, code in codes.items():
                        (Path(folder) / f"{number}.code").write_text(f"{code}\n")
                    if failure is not None:
                        raise failure

                return call

            return decorate

        monkeypatch.setattr(commands.hydra, "main", main)
        return given

    return launch


SWEEP = ("-m", "pipeline.stages=1,2", "hydra/launcher=other", "hydra.launcher.nodes=3")


@pytest.mark.parametrize(
    ("codes", "failure", "code", "said"),
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
def test_jobs_that_run_elsewhere_are_told_of(say, elsewhere, capsys, codes, failure, code, said):
    (given,) = [elsewhere(codes, failure)]
    say(*SWEEP)
    assert run_jobs(pytest.fail, "train") == code
    errors = capsys.readouterr().err
    assert all(each in errors for each in said)
    assert errors.count("ended") == sum("ended" in each for each in said)
    assert given[0][1:5] == list(SWEEP)


def test_a_sweep_elsewhere_is_refused_before_any_job_runs(say, elsewhere, capsys):
    given = elsewhere({0: 0, 1: 0})
    say(*SWEEP, "run.dir=runs/same")
    assert run_jobs(pytest.fail, "train", unshared="run.dir") == 2
    assert "bad run.dir" in capsys.readouterr().err and not given


def test_settings_that_cannot_work_end_with_code_2_other_errors_with_1():
    assert exit_code_of(ConfigError("a")) == exit_code_of(ScheduleError("b")) == 2
    assert exit_code_of(DataError("c")) == exit_code_of(OSError("d")) == 1


def test_what_another_rank_has_refused_ends_with_its_code():
    """One rank ended with 2 and all others with 1: a script took the run for one that crashed."""
    told = "rank 1 on vm: train.device: expected one for each rank, got cuda:0 for both"
    assert exit_code_of(PeerError(told, is_mistake=True)) == 2
    assert exit_code_of(PeerError(told)) == 1


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
def test_training_that_cannot_begin_ends_with_code_2(say, tiny, words):
    say(*tiny, "run.dir=run", "train.keep_freed_memory=false", *words)
    assert exit_code(run_command, StopRequest()) == 2


def test_drawing_what_cannot_be_drawn_ends_with_code_2(say):
    say("draw.format=pdf")
    assert exit_code(draw) == 2
    say("-m", "draw.format=text,svg", "draw.out=one")
    assert exit_code(draw) == 2


def test_a_signal_ends_a_sweep_and_jobs_without_folders_get_their_own(say, monkeypatch):
    stop, folders = StopRequest(), []

    def train(config, world, stop, doubts, words):
        assert f"optimizer.lr={len(folders) + 1}" in words
        folders.append(config.run.dir)
        if len(folders) == 2:
            stop.signal = 15
        return 75 if stop.is_requested else 0

    monkeypatch.setattr(command, "run_training", train)
    monkeypatch.setattr(command, "end_soon", sys.exit)  # this process goes on
    say("-m", "optimizer.lr=1,2,3", "train.keep_freed_memory=false")
    assert exit_code(run_command, stop) == 75
    assert len(folders) == 2 and folders[0].startswith("runs/")
    assert [folder.rpartition("/")[2] for folder in folders] == ["1", "2"]


@pytest.mark.parametrize(("is_mistake", "code"), [(True, 2), (False, 75)])
def test_a_rank_that_is_told_to_end_is_not_queued_again_for_what_another_refused(
    say, monkeypatch, is_mistake, code
):
    """Slurm takes the highest code of all ranks: the others' 75 would have hidden the 2."""
    stop = StopRequest()

    def train(*_):
        monkeypatch.setattr(StopRequest, "was_terminated", True)
        raise PeerError("rank 1 on vm: what it is", is_mistake=is_mistake)

    monkeypatch.setattr(command, "run_training", train)
    monkeypatch.setattr(command, "end_soon", sys.exit)  # this process goes on
    say("train.keep_freed_memory=false")
    assert exit_code(run_command, stop) == code


@pytest.mark.slow
def test_jobs_of_a_sweep_train_as_they_do_alone(start, tiny, tmp_path):
    settings = (*tiny, "train.steps=2", "model.dropout=0.1", "lr.warmup_steps=0")
    swept = start("-m", *settings, "optimizer.lr=1e-3,1e-2", "run.dir=of/${optimizer.lr}")
    alone = start(*settings, "optimizer.lr=1e-2", "run.dir=alone")
    assert swept.wait(60).code == alone.wait(60).code == 0, swept.output
    assert losses(tmp_path / "of" / "0.01") == losses(tmp_path / "alone")
    assert losses(tmp_path / "of" / "0.001") != losses(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"of", "alone"}


@pytest.mark.slow
def test_a_sweep_under_a_launcher_is_refused(start_ranks, tiny):
    """Job 2 would take over the connections of job 1, whatever its own settings say of them."""
    ranks = start_ranks(2, "-m", *tiny, "optimizer.lr=1,2").wait(60)
    assert ranks.codes == [2, 2]
    assert all("the launcher has started 2; launch" in x for x in ranks.outputs)


REFERRING = [p for p in sorted(conf_dir().glob("model/*.yaml")) if "${data." in p.read_text()]
DIFFERENT = ("resnet_small", "gpt", "unet", "vgg16")  # each goes with other data


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in DIFFERENT else pytest.mark.slow, id=path.stem)
        for path in REFERRING
    ],
)
def test_a_model_without_fitting_data_is_told_what_goes_with_it(path):
    """model=resnet_small was told what goes with an MLP and a VGG."""
    other = "synthetic" if "data.num_classes" in path.read_text() else "synthetic_vectors"
    with pytest.raises(ConfigError, match=f"model={path.stem} goes with data=") as refusal:
        compose_config([f"model={path.stem}", f"data={other}", "train.steps=1"])
    named = str(refusal.value).partition("goes with data=")[2].partition(")")[0]
    compose_config([f"model={path.stem}", f"data={named}"])
    if path.stem == "resnet_small":
        assert named == "digits"


def test_an_error_is_called_by_a_name_that_users_know(capsys):
    """A run said `_LossError: ...`, a name of a file of ours."""

    class _Inner(ModelError):
        pass

    assert print_error(_Inner("loss: failed"), says_kind=True) == 2
    assert capsys.readouterr().err == "gpipe_hpc: ModelError: loss: failed\n"


def test_ctrl_c_ends_a_command_in_a_line(say, capsys):
    """`plan` and `verify` showed where in us they were."""

    def task(job):
        raise KeyboardInterrupt

    say()
    assert run_jobs(task, "plan") == 130
    assert capsys.readouterr().err == "\ngpipe_hpc: interrupted\n"
