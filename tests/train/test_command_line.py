"""The command line, as a user calls it, on models of a moment."""

import math
import signal

import pytest

from tests.support import has_begun, losses, metrics, train_here

STOPPED = 75
SLOW = pytest.mark.slow


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_one_process_trains_and_says_so(train, tiny, tmp_path):
    shown = ("train.validate_every=3", "lr.warmup_steps=9")
    output = train(1, *tiny, "train.steps=3", "run.dir=run", *shown)
    assert "WARNING" in output and "lr.warmup_steps=9 is longer than train.steps=3" in output
    assert "step 1/3  loss 5.5" in output and "bubble" in output
    assert "step 3: validation loss" in output
    run = tmp_path / "run"
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 3, 3]
    assert [*metrics(run)[3]] == ["step", "validation_loss"]
    assert [*metrics(run)[4]] == ["step", "checkpoint_stall_s"]
    assert checkpoints(run) == ["step_00000003"]
    kept = {"step", "loss", "lr", "grad_norm", "step_time_s", "samples_per_s", "bubble"}
    assert kept <= metrics(run)[0].keys()
    names = {path.name for path in run.iterdir()}
    files = {"config.yaml", "run.json", "metrics.jsonl", "calibration.yaml"}
    assert names == files | {"tensorboard", "checkpoints", "logs", "summary.json", "trace"}
    assert "schedule: gpipe" in (run / "config.yaml").read_text()


def test_two_ranks_train_as_one_does(train, tiny, tmp_path):
    settings = (*tiny, "train.steps=4", "model.dropout=0.1")
    train(1, *settings, "run.dir=one", "metrics.to=[]")
    assert not (tmp_path / "one" / "tensorboard").exists()
    output = train(2, *settings, "run.dir=two")
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    for rank in range(2):
        assert (tmp_path / "two" / "logs" / f"rank{rank}.log").exists()
    assert output.count("step 1/4") == 1


@SLOW
def test_keeps_the_newest_checkpoints(train, tiny, tmp_path):
    every = ("checkpoint.every=2", "checkpoint.keep=3")
    train(1, *tiny, *every, "train.steps=9", "run.dir=run")
    assert checkpoints(tmp_path / "run") == ["step_00000006", "step_00000008", "step_00000009"]


def test_a_run_resumes_to_the_bit(tiny, tmp_path, same_end):
    settings = (*tiny, "train.steps=9", "model.dropout=0.1")
    train_here(2, *settings, f"run.dir={tmp_path}/whole")
    train_here(2, *settings, f"run.dir={tmp_path}/parts", "train.stop_at=4")
    assert checkpoints(tmp_path / "parts") == ["step_00000004"]
    train_here(2, *settings, f"run.dir={tmp_path}/parts")
    assert "4 steps done" in (tmp_path / "parts" / "logs" / "rank0.log").read_text()
    same_end(tmp_path / "whole", tmp_path / "parts")
    assert [line["step"] for line in metrics(tmp_path / "parts") if "loss" in line] == [
        *range(1, 10)
    ]


@SLOW
def test_a_measured_cut_gives_way_to_another_layout_and_another_model(
    start_ranks, train, tiny, tmp_path
):
    """It was taken over as it was: one process could not go on where two had left, and another
    model was refused for a cut that nobody had asked for."""
    settings = (*tiny, "train.steps=2", "pipeline.partition=time")
    train(2, *settings, "run.dir=run")
    assert "resumed from" in train(1, *settings, "checkpoint.resume=run", "run.dir=alone")
    ranks = start_ranks(2, *settings, "checkpoint.resume=run", "model.num_layers=2").wait(60)
    assert all("is of another model" in text for text in ranks.outputs)


@SLOW
def test_a_finished_run_that_is_started_again_changes_nothing(train, tiny, tmp_path):
    settings = (*tiny, "train.steps=3", "run.dir=run")
    train(1, *settings)
    before = losses(tmp_path / "run")
    train(1, *settings)
    assert losses(tmp_path / "run") == before
    assert checkpoints(tmp_path / "run") == ["step_00000003"]


@SLOW
def test_validation_alone(train, tiny, tmp_path):
    size = "data.num_validation_samples=13"  # the last batch has 5 samples
    train(2, *tiny, size, "train.steps=3", "run.dir=run", "train.validate_every=3")
    written = metrics(tmp_path / "run")
    (validated,) = [x["validation_loss"] for x in written if "validation_loss" in x]
    for number, resume in enumerate(("run", "run/checkpoints/step_00000003")):
        alone = ("train.steps=0", f"checkpoint.resume={resume}", f"run.dir=alone{number}")
        output = train(1, *tiny, size, *alone)
        assert f"step 3: validation loss {validated:.4f}" in output
        (line,) = metrics(tmp_path / f"alone{number}")
        assert math.isclose(line["validation_loss"], validated, rel_tol=1e-6)
    assert not (tmp_path / "alone0" / "checkpoints").exists()


@SLOW
def test_validation_alone_of_an_older_checkpoint_leaves_the_run_as_it_was(train, tiny, tmp_path):
    train(1, *tiny, "train.steps=6", "checkpoint.every=3", "run.dir=run")
    before = metrics(tmp_path / "run")
    older = "checkpoint.resume=run/checkpoints/step_00000003"
    output = train(1, *tiny, "train.steps=0", older, "run.dir=run")
    assert "step 3: validation loss" in output
    assert [x for x in metrics(tmp_path / "run") if "loss" in x] == [
        x for x in before if "loss" in x
    ]
    assert checkpoints(tmp_path / "run") == ["step_00000003", "step_00000006"]


@SLOW
@pytest.mark.parametrize("resume", ["never", "first/checkpoints/step_00000003"])
def test_a_run_that_starts_over_is_what_auto_resumes_later(train, tiny, tmp_path, resume, same_end):
    """A second run in one folder skipped its saves where the first had left a checkpoint."""
    first = (*tiny, "train.steps=8", "checkpoint.every=3", "checkpoint.keep=9")
    train(1, *first, "run.dir=first")
    if resume == "never":
        train(1, *first, "run.dir=run")
    other = (*tiny, "train.steps=8", "checkpoint.every=3", "optimizer.lr=0.01")
    over = (*other, f"checkpoint.resume={resume}")
    output = train(1, *over, "run.dir=run", "train.stop_at=6")
    assert ("abandoned_step_00000008" in output) == (resume == "never")
    assert "6 steps done" in train(1, *other, "run.dir=run")
    train(1, *over, "run.dir=clean")
    same_end(tmp_path / "run", tmp_path / "clean")


@SLOW
def test_going_back_within_a_run(train, tiny, tmp_path, same_end):
    settings = (*tiny, "train.steps=6", "checkpoint.every=2", "checkpoint.keep=9")
    train(1, *settings, "run.dir=run")
    train(1, *settings, "run.dir=whole")
    back = "checkpoint.resume=run/checkpoints/step_00000002"
    for _ in range(2):
        assert "2 steps done" in train(1, *settings, back, "run.dir=run")
        assert [x["step"] for x in metrics(tmp_path / "run") if "loss" in x] == [*range(1, 7)]
        same_end(tmp_path / "run", tmp_path / "whole")
    names = checkpoints(tmp_path / "run")
    assert [name for name in names if "abandoned" in name] == [
        "abandoned_step_00000004",
        "abandoned_step_00000006",
    ]


@SLOW
def test_a_launchers_restart_goes_on_from_its_own_steps(train, tiny):
    """A run that began from another's checkpoint began there anew after every requeue."""
    train(1, *tiny, "train.steps=2", "run.dir=first")
    settings = (*tiny, "train.steps=6", "checkpoint.resume=first", "run.dir=run")
    assert "2 steps done" in train(1, *settings, "train.stop_at=4")
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert "4 steps done" in train(1, *settings, env=restarted)


@SLOW
@pytest.mark.parametrize("resume", ["never", "first"])
def test_an_explicit_resume_wins_over_a_requeue_mark(train, tiny, tmp_path, resume):
    """It was ignored where REQUEUE lay, and the run went on from its own newest."""
    train(1, *tiny, "train.steps=2", "run.dir=first")
    settings = (*tiny, "train.steps=6", "run.dir=run")
    train(1, *settings, "train.stop_at=4")
    (tmp_path / "run" / "REQUEUE").write_text("4\n")
    output = train(1, *settings, f"checkpoint.resume={resume}")
    assert "4 steps done" not in output and "set it to auto to continue" in output
    assert ("2 steps done" in output) == (resume == "first")
    assert not (tmp_path / "run" / "REQUEUE").exists()


@SLOW
def test_another_command_in_the_folder_of_a_run_is_refused_with_the_difference(
    start, train, tiny, tmp_path
):
    """A second run in one Slurm allocation trained nothing, and overwrote config.yaml."""
    job = {"SLURM_JOB_ID": "4711"}
    train(1, *tiny, "train.steps=3", env=job)
    run = tmp_path / "runs" / "slurm_4711"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    second = (*tiny, "train.steps=3", "optimizer.lr=0.5", "model.width=32")
    for count in ("0", "1"):
        refused = start(*second, env=job | {"SLURM_RESTART_COUNT": count}).wait()
        assert refused.code == 2, refused.output
        assert "optimizer.lr: was 0.001, is 0.5" in refused.output
        assert "model.width: was 16, is 32" in refused.output
        assert "checkpoint.resume=never" in refused.output and "Traceback" not in refused.output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    train(1, *second, env=job | {"SLURM_STEP_ID": "1"})
    assert len(losses(tmp_path / "runs" / "slurm_4711_1")) == 3
    said = train(1, *tiny, "train.steps=3", env=job)
    assert "nothing to train" in said and "has already done 3 steps" in said


@SLOW
def test_a_run_goes_on_with_changed_settings_when_told_and_keeps_the_earlier_ones(
    train, tiny, tmp_path
):
    settings = (*tiny, "train.steps=6", "run.dir=run")
    train(1, *settings, "train.stop_at=2")
    run = tmp_path / "run"
    train(1, *settings, "optimizer.lr=0.5", "train.stop_at=4", "checkpoint.resume=run")
    assert "lr: 0.001" in (run / "config_1.yaml").read_text()
    assert "lr: 0.5" in (run / "config.yaml").read_text()
    (run / "REQUEUE").write_text("4\n")
    said = train(1, *settings, "optimizer.lr=0.25")
    assert "continuing with a changed setting: optimizer.lr: was 0.5, is 0.25" in said
    assert "lr: 0.5" in (run / "config_2.yaml").read_text()
    assert [line["step"] for line in metrics(run) if "loss" in line] == [*range(1, 7)]


@SLOW
def test_how_long_keeping_the_state_held_up_a_run_is_told(train, tiny, tmp_path):
    (tmp_path / "memory").mkdir()
    kept = ("checkpoint.every=2", "checkpoint.in_background=true", "checkpoint.neighbour_every=3")
    place = ("checkpoint.neighbour_dir=memory", "run.dir=run")
    said = train(2, *tiny, "train.steps=5", *kept, *place)
    assert "delayed the run by" in said and "written in the background" in said
    assert "all ranks are on one host" in said
    stalls = {}
    for line in metrics(tmp_path / "run"):
        for name in line.keys() & {"checkpoint_stall_s", "neighbour_stall_s"}:
            assert line[name] > 0
            stalls.setdefault(name, []).append(line["step"])
    assert stalls["neighbour_stall_s"] == [3]
    # Begun after steps 2 and 4, finished when all have written, and saved at the end.
    assert {2, 4, 5} <= set(stalls["checkpoint_stall_s"])
    assert checkpoints(tmp_path / "run") == ["step_00000004", "step_00000005"]


@SLOW
def test_a_start_that_fails_does_not_speak_for_the_checkpoint(start, train, tiny, tmp_path):
    """Its settings are the last ones in config.yaml, but nothing was trained with them."""
    settings = (*tiny, "train.steps=4", "run.dir=run")
    train(1, *settings, "train.stop_at=2")
    other = ("model.width=32", "checkpoint.resume=run/checkpoints/step_00000002")
    assert "is of another model" in start(*settings, *other).wait().output
    assert "width: 32" in (tmp_path / "run" / "config.yaml").read_text()
    assert "2 steps done" in train(1, *settings)


@SLOW
def test_a_second_run_in_the_same_folder_is_refused_before_it_writes(start, tiny, tmp_path, until):
    """It erased lines of the first one's metrics, and died at its checkpoint."""
    run = tmp_path / "run"
    first = start(*tiny, "train.steps=5000", "run.dir=run")
    until(lambda: has_begun(run, 2), 30, "it trains")
    second = start(*tiny, "train.steps=9", "run.dir=run").wait()
    assert second.code == 1 and f"used by another run: process {first.pid} on " in second.output
    assert "Traceback" not in second.output
    assert "steps: 5000" in (run / "config.yaml").read_text()
    first.signal(signal.SIGTERM)
    assert first.wait().code == STOPPED, first.output
    steps = [line["step"] for line in metrics(run) if "loss" in line]
    assert steps == [*range(1, len(steps) + 1)]
    assert not (run / "LOCK").exists()


@SLOW
def test_the_lock_of_a_killed_run_is_taken_over(start, train, tiny, tmp_path, until):
    run = tmp_path / "run"
    settings = (*tiny, "train.steps=5000", "checkpoint.every=2", "run.dir=run")
    first = start(*settings)
    until(lambda: (run / "checkpoints" / "step_00000002").exists(), 30, "it saves")
    first.signal(signal.SIGKILL)
    first.wait()
    assert (run / "LOCK").exists()
    (newest, *_) = sorted((run / "checkpoints").glob("step_????????"), reverse=True)
    done = int(newest.name.removeprefix("step_"))
    said = train(1, *settings, f"train.stop_at={done + 1}")
    assert "took over the lock of process" in said and f"{done} steps done" in said
    assert sorted(path.name for path in run.glob("LOCK*")) == []


@SLOW
def test_resumes_on_other_layouts(train, tiny, tmp_path):
    """Whatever the number of stages and replicas and the schedule; float32, so to 1e-5."""
    settings = (*tiny, "train.steps=8", "pipeline.microbatches=4")
    train(1, *settings, "run.dir=whole")
    train(2, *settings, "run.dir=parts", "train.stop_at=4")
    layouts = [
        (4, ("pipeline.stages=2", "pipeline.replicas=2", "pipeline.microbatches=2")),
        (3, ("pipeline.stages=3", "pipeline.schedule=one_f_one_b", "pipeline.recompute=always")),
        (2, ("pipeline.stages=1", "pipeline.replicas=2", "pipeline.microbatches=2")),
    ]
    for number, (size, layout) in enumerate(layouts):
        start = "checkpoint.resume=parts"
        train(size, *settings, *layout, start, f"run.dir=on{number}")
        resumed = losses(tmp_path / f"on{number}")
        assert resumed == pytest.approx(losses(tmp_path / "whole")[4:], rel=1e-5)


@SLOW
def test_a_measured_cut_is_kept_on_the_same_layout(train, tiny, tmp_path):
    settings = (*tiny, "train.steps=6", "pipeline.partition=time", "run.dir=run")
    first = train(2, *settings, "train.stop_at=3")
    second = train(2, *settings)
    tables = [text.partition("stages:")[2].partition("expected")[0] for text in (first, second)]
    rows = [[row.split() for row in table.splitlines()[:5]] for table in tables]
    assert rows[0] == rows[1] and len(rows[0][2]) > 3


@SLOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_asks_to_be_started_again(
    start, train, tiny, tmp_path, until, same_end, number
):
    settings = (*tiny, "train.steps=5000")
    run = tmp_path / "run"
    stopped = start(*settings, "run.dir=run")
    until(lambda: has_begun(run, 2), 30, "it trains")
    stopped.signal(number)
    assert stopped.wait().code == STOPPED, stopped.output
    done = metrics(run)[-1]["step"]
    assert (run / "REQUEUE").read_text() == f"{done}\n"
    assert checkpoints(run) == [f"step_{done:08d}"]
    end = (*settings, f"train.stop_at={done + 5}")
    train(1, *end, "run.dir=run")
    assert not (run / "REQUEUE").exists()
    train(1, *end, "run.dir=whole")
    same_end(tmp_path / "whole", run)


@SLOW
def test_a_signal_to_one_rank_stops_all_at_one_step(start_ranks, tiny, tmp_path, until):
    run = tmp_path / "run"
    ranks = start_ranks(2, *tiny, "train.steps=5000", "run.dir=run")
    until(lambda: has_begun(run, 2), 30, "it trains")
    ranks.commands[1].signal(signal.SIGTERM)
    assert ranks.wait().codes == [STOPPED, STOPPED], ranks.outputs
    assert checkpoints(run) == [f"step_{metrics(run)[-1]['step']:08d}"]


def test_a_signal_before_the_first_step_is_not_lost(start, tiny, tmp_path, until):
    command = start(*tiny, "train.steps=5000", "run.dir=run")
    until(lambda: command.output or command.code is not None, 30, "it says something")
    command.signal(signal.SIGTERM)
    assert command.wait().code == STOPPED, command.output
    assert (tmp_path / "run" / "REQUEUE").exists()


def test_draws_simulated_schedules(start):
    wanted = ("pipeline.stages=3", "pipeline.microbatches=4", "pipeline.schedule=one_f_one_b")
    image = start(*wanted, "draw.format=svg", module="gpipe_hpc.draw").wait()
    assert image.code == 0 and image.output.startswith("<svg")
    wrong = start("pipeline.schedule=nonesuch", module="gpipe_hpc.draw").wait()
    assert wrong.code != 0 and "one_f_one_b" in wrong.output
    assert "Traceback" not in wrong.output


@SLOW
def test_draws_what_a_run_measured(start, train, tiny, tmp_path):
    train(2, *tiny, "train.steps=4", "run.dir=run")
    assert len(list((tmp_path / "run" / "trace").iterdir())) == 1
    text = start("run.dir=run", module="gpipe_hpc.draw").wait()
    assert text.code == 0 and "rank 1" in text.output, text.output
    out = ("draw.format=svg", "draw.out=picture.svg")
    assert start("run.dir=run", *out, module="gpipe_hpc.draw").wait().code == 0
    picture = (tmp_path / "picture.svg").read_text()
    assert picture.startswith("<svg") and "0F0" in picture and "1B1" in picture
    bare = start("run.dir=nowhere", module="gpipe_hpc.draw").wait()
    assert bare.code == 2 and "does not exist" in bare.output
