"""Runs that are killed and started again end as one that never was: to the last bit."""

import os
import random
import shutil
import signal
import socket
import time

import pytest

from tests.conftest import losses
from tests.support import has_begun, product

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

STEPS = 250
# A user's module that gives a small model, and a slow or full disk when asked for.
BAD_DISK = """
import os
import time

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gpipe_hpc.models import build_gpt

write = FileSystemWriter.write_data


def write_slowly(self, plan, planner):
    done = write(self, plan, planner)
    if concerned(self.path):
        time.sleep(3600)
    return done


def write_nothing(self, plan, planner):
    if concerned(self.path):
        raise OSError("no space left")
    return write(self, plan, planner)


def concerned(path):
    return "step_00000006" in str(path) and os.environ.get("BAD_RANK", "1") == os.environ["RANK"]


def build(slow=False, full=False, **own):
    # Of the preset only what the test sets comes along.
    keywords = {"vocab_size": 256, "block_size": 16, "num_heads": 4, "dropout": 0.0, **own}
    if slow:
        FileSystemWriter.write_data = write_slowly
    if full:
        FileSystemWriter.write_data = write_nothing
    return build_gpt(**keywords)
"""


@pytest.fixture
def settings(tiny):
    return (*tiny, f"train.steps={STEPS}", "checkpoint.every=10", "model.dropout=0.1")


@pytest.mark.parametrize("form", ["standalone", product("master-port")])
def test_kill_9_of_one_rank_at_a_random_step_changes_nothing(
    torchrun, train, settings, tmp_path, until, free_port, same_end, form
):
    """Gloo hangs here out of the box: restarted ranks read the addresses of the dead."""
    train(2, *settings, "run.dir=whole")
    if form == "standalone":
        # Without run.dir, restarted ranks have to find the folder of the first attempt.
        flags, folder = ["--standalone"], []
    else:
        flags, folder = ["--master-port", str(free_port())], ["run.dir=runs/named"]
    launch = torchrun([*flags, "--nproc_per_node=2", "--max-restarts=2"], *settings, *folder)
    runs = tmp_path / "runs"
    rank, step = random.randrange(2), random.randrange(3, 100)
    print(f"kills rank {rank} after step {step} or so")
    until(
        lambda: runs.exists() and any(has_begun(run, step) for run in runs.iterdir()),
        60,
        "it trains",
    )
    victim = launch.worker(rank)
    assert victim is not None, launch.output
    os.kill(victim, signal.SIGKILL)
    assert launch.wait() == 0, launch.output
    assert launch.output.count("INFO rank 0 stage 0 gpipe_hpc.train: run folder") == 2
    (run,) = runs.iterdir()
    same_end(tmp_path / "whole", run)


def test_a_checkpoint_cut_short_is_never_loaded(
    start_ranks, train, tiny, tmp_path, until, same_end
):
    (tmp_path / "disk.py").write_text(BAD_DISK)
    mine = (*tiny, "model._target_=disk.build", "train.steps=9", "checkpoint.every=3")
    env = {"PYTHONPATH": str(tmp_path)}
    kept = tmp_path / "run" / "checkpoints"
    ranks = start_ranks(2, *mine, "model.slow=true", "run.dir=run", env=env)
    partial = kept / "step_00000006.partial"
    until(
        lambda: partial.exists() and len(list(partial.glob("*.distcp"))) == 2,
        60,
        "all have written",
    )
    for command in ranks.commands:
        command.signal(signal.SIGKILL)
    ranks.wait()
    assert sorted(p.name for p in kept.iterdir()) == ["step_00000003", "step_00000006.partial"]
    assert "3 steps done" in train(2, *mine, "run.dir=run", "checkpoint.resume=run", env=env)
    assert sorted(p.name for p in kept.iterdir()) == ["step_00000006", "step_00000009"]
    train(2, *mine, "run.dir=whole", env=env)
    same_end(tmp_path / "whole", tmp_path / "run")


def test_a_rank_killed_while_saving_is_named_by_the_others(start_ranks, tiny, tmp_path, until):
    (tmp_path / "disk.py").write_text(BAD_DISK)
    slow = ("model._target_=disk.build", "model.slow=true", "checkpoint.every=3", "run.dir=run")
    env = {"PYTHONPATH": str(tmp_path)}
    ranks = start_ranks(3, *tiny, *slow, env=env)
    partial = tmp_path / "run" / "checkpoints" / "step_00000006.partial"
    until(
        lambda: partial.exists() and len(list(partial.glob("*.distcp"))) == 3,
        60,
        "all have written",
    )
    ranks.commands[1].signal(signal.SIGKILL)
    ranks.wait(20)
    for rank in (0, 2):
        assert ranks.codes[rank] not in (0, None)
        output = ranks.outputs[rank]
        assert "rank 1 on " in output and "SIGKILL" in output and "Traceback" not in output, output


def test_a_full_disk_is_named_by_all(start_ranks, tiny, tmp_path):
    (tmp_path / "disk.py").write_text(BAD_DISK)
    full = ("model._target_=disk.build", "model.full=true", "checkpoint.every=3", "run.dir=run")
    ranks = start_ranks(2, *tiny, *full, env={"PYTHONPATH": str(tmp_path)}).wait(20)
    for code, output in zip(ranks.codes, ranks.outputs, strict=True):
        assert code not in (0, None)
        # Of a traceback there are the frames of the user's disk.py alone.
        named = f"rank 1 on {socket.gethostname()}: checkpoint"
        assert named in output and "/gpipe_hpc/" not in output, output
        assert "no space left" in output, output
        assert " MB free and the checkpoint takes about " in output, output
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["step_00000003"], "what was cut short takes no room"


def test_torchrun_passes_a_signal_on_and_the_run_goes_on_later(
    torchrun, train, settings, tmp_path, until, same_end
):
    run = tmp_path / "run"
    settings = (*settings, "train.steps=5000")
    passed = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    launch = torchrun([passed, "--standalone", "--nproc_per_node=2"], *settings, "run.dir=run")
    until(lambda: has_begun(run), 60, "it trains")
    launch.send(signal.SIGUSR1)
    assert launch.wait() != 0
    done = int((run / "REQUEUE").read_text())
    assert (run / "checkpoints" / f"step_{done:08d}").is_dir()
    end = f"train.stop_at={done + 5}"
    train(2, *settings, end, "run.dir=run")
    assert not (run / "REQUEUE").exists()
    train(2, *settings, end, "run.dir=whole")
    same_end(tmp_path / "whole", run)


@pytest.mark.parametrize(
    "saving", ["checkpoint.in_background=true", product("checkpoint.in_background=false")]
)
def test_kill_9_at_any_moment_of_saving_loses_nothing(
    start_ranks, train, tiny, tmp_path, until, same_end, saving
):
    """Saves without a break, killed at random moments, several times over."""
    model = ("model.width=128", "train.steps=5000")  # many more than a fast machine comes to
    settings = (*tiny, *model, "checkpoint.every=1", saving)
    run = tmp_path / "run"
    begun_at = -1
    for _ in range(4):
        ranks = start_ranks(2, *settings, "run.dir=run")
        until(lambda last=begun_at: newest(run) > last, 60, "it saves")
        pause_s = random.uniform(0.0, 1.0)
        print(f"kills after {pause_s:.3f} s, at step {newest(run)} or so")
        time.sleep(pause_s)
        for command in ranks.commands:
            command.signal(signal.SIGKILL)
        ranks.wait()
        assert all("Error" not in text for text in ranks.outputs), ranks.outputs
        begun_at = newest(run)
    end = f"train.stop_at={begun_at + 5}"
    said = train(2, *settings, end, "run.dir=run")
    assert f"{begun_at} steps done" in said
    train(2, *tiny, *model, end, "run.dir=whole")
    same_end(tmp_path / "whole", run)
    assert not list((run / "checkpoints").glob("*.partial"))


def newest(run):
    """Return the step of the newest checkpoint, by its name; -1 if there is none."""
    found = (run / "checkpoints").glob("step_????????")
    return max((int(path.name.removeprefix("step_")) for path in found), default=-1)


def test_training_goes_on_while_a_disk_hangs(start_ranks, train, tiny, tmp_path, until, same_end):
    (tmp_path / "disk.py").write_text(BAD_DISK)
    mine = (*tiny, "model._target_=disk.build", "train.steps=11", "checkpoint.every=6")
    behind = (*mine, "checkpoint.in_background=true")
    env = {"PYTHONPATH": str(tmp_path)}
    run = tmp_path / "run"
    ranks = start_ranks(2, *behind, "model.slow=true", "run.dir=run", env=env)
    until(
        lambda: has_begun(run) and '"step": 11' in (run / "metrics.jsonl").read_text(),
        60,
        "it ends",
    )
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000006.partial"]
    assert ranks.codes == [None, None], "the last checkpoint waits for the one before"
    for command in ranks.commands:
        command.signal(signal.SIGKILL)
    ranks.wait()
    train(2, *behind, "run.dir=run", env=env)
    train(2, *mine, "run.dir=whole", env=env)
    same_end(tmp_path / "whole", run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[0] == "step_00000006"


def test_a_full_disk_is_named_by_all_at_a_later_step(start_ranks, tiny, tmp_path):
    (tmp_path / "disk.py").write_text(BAD_DISK)
    full = ("model._target_=disk.build", "model.full=true", "checkpoint.every=3", "run.dir=run")
    behind = (*full, "checkpoint.in_background=true")
    ranks = start_ranks(2, *tiny, *behind, env={"PYTHONPATH": str(tmp_path)}).wait(30)
    for code, output in zip(ranks.codes, ranks.outputs, strict=True):
        assert code not in (0, None)
        assert "no space left" in output and "/gpipe_hpc/" not in output, output
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["step_00000003"], "what was cut short takes no room"


COPIED = ("checkpoint.neighbour_every=3", "checkpoint.neighbour_dir=memory")


@pytest.mark.long
def test_kill_9_between_checkpoints_costs_only_the_steps_since_the_last_copy(
    torchrun, train, settings, tmp_path, until, same_end
):
    """All went on from the last checkpoint on disk: here there is none."""
    alone = (*settings, "checkpoint.every=0")
    train(2, *alone, "run.dir=whole")
    (tmp_path / "memory").mkdir()
    flags = ["--standalone", "--nproc_per_node=2", "--max-restarts=2"]
    launch = torchrun(flags, *alone, *COPIED, "run.dir=run")
    run = tmp_path / "run"
    rank, step = random.randrange(2), random.randrange(20, 120)
    print(f"kills rank {rank} after step {step} or so")
    until(lambda: has_begun(run, step), 60, "it trains")
    os.kill(launch.worker(rank), signal.SIGKILL)
    assert launch.wait() == 0, launch.output
    assert "resumed from copies in memory" in launch.output, launch.output
    same_end(tmp_path / "whole", run)
    assert list((tmp_path / "memory").iterdir()) == [], "the job has ended for good"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_copies_in_memory_are_removed_when_a_user_ends_the_job(
    start_ranks, tiny, tmp_path, until, number
):
    (tmp_path / "memory").mkdir()
    ranks = start_ranks(2, *tiny, *COPIED, "train.steps=100000", "run.dir=run")
    copies = tmp_path / "memory" / f"gpipe_hpc_{os.getuid()}"
    until(lambda: len(list(copies.glob("*/rank*"))) >= 4, 60, "there are two generations")
    for command in ranks.commands:
        command.signal(number)
    ranks.wait(30)
    assert 0 not in ranks.codes and list((tmp_path / "memory").iterdir()) == [], ranks.outputs


def test_copies_of_an_older_history_are_not_taken(start, train, tiny, tmp_path, until):
    """A run that went back, or changed its settings, would go on from what it had given up."""
    (tmp_path / "memory").mkdir()
    settings = (*tiny, *COPIED, "checkpoint.every=5", "checkpoint.keep=99", "run.dir=run")
    killed = start(*settings, "train.steps=100000")
    run = tmp_path / "run"
    until(lambda: (run / "checkpoints" / "step_00000010").exists(), 60, "it saves")
    killed.signal(signal.SIGKILL)
    killed.wait()
    back = "checkpoint.resume=run/checkpoints/step_00000005"
    plain = ("train.steps=100000", "checkpoint.neighbour_every=0")
    assert "5 steps done" in train(1, *settings, *plain, back, "train.stop_at=7")
    said = train(1, *settings, "train.steps=100000", "train.stop_at=9")
    assert "7 steps done" in said and "from copies" not in said


def test_a_host_that_returns_with_newer_copies_leaves_no_gap(start, train, tiny, tmp_path, until):
    """The run had gone back without them, and dropped those lines of its metrics."""
    memory = tmp_path / "memory"
    memory.mkdir()
    settings = (*tiny, *COPIED, "checkpoint.every=5", "checkpoint.keep=99", "run.dir=run")
    killed = start(*settings, "train.steps=100000")
    until(lambda: has_begun(tmp_path / "run", 40), 60, "it copies")
    killed.signal(signal.SIGKILL)
    killed.wait()
    # The host goes, with what stands in its memory and all checkpoints but the first one.
    memory.rename(tmp_path / "away")
    memory.mkdir()
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if path.name != "step_00000005":
            shutil.rmtree(path)
    assert "5 steps done" in train(1, *settings, "train.steps=100000", "train.stop_at=7")
    shutil.rmtree(memory)
    (tmp_path / "away").rename(memory)
    said = train(1, *settings, "train.steps=100000", "train.stop_at=100")
    assert "7 steps done" in said and "from copies" not in said
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 101))
