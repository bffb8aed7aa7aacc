"""Training under a real Slurm: as elsewhere to the bit, and going on after what ends a start."""

import importlib.util
import os
import re
import shlex
import signal
import sys

import pytest

from tests.cluster.slurm import BatchJob
from tests.support import has_begun, losses

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

# Four ranks on two nodes, of one core each.
SIZE = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30")
STEPS = 300


@pytest.fixture
def settings(tiny):
    return (*tiny, f"train.steps={STEPS}", "checkpoint.every=20", "model.dropout=0.1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return tmp_path_factory.mktemp("undisturbed") / "run"


@pytest.fixture
def as_undisturbed(undisturbed, settings, start, same_end):
    """Return a function that holds a run against one process that nobody disturbed."""

    def compare(run):
        if not undisturbed.exists():
            command = start(*settings, f"run.dir={undisturbed}").wait(120)
            assert command.code == 0, command.output
        same_end(run, undisturbed)

    return compare


def submitted(slurm, edited, settings, folder, until, *options, num_lines=40, **values):
    """Submit a run and return its job once it trains, so many lines of metrics on."""
    script = edited(settings, RUN_DIR="run", **values)
    job = slurm.submit(script, *SIZE, *options, folder=folder)
    until(lambda: has_begun(folder / "run", num_lines), 200, f"it trained: {said(folder)}")
    return job


def said(folder):
    """Return all that a job and its ranks said."""
    files = sorted([*folder.glob("gpipe-hpc-*.txt"), *folder.glob("run/starts/*.txt")])
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in files)


def starts(folder):
    """Return the steps and nodes of all starts."""
    lines = [line.split() for line in (folder / "run/starts/starts.txt").read_text().splitlines()]
    return [(int(words[1]), words[4]) for words in lines if words[0] == "start"]


@pytest.mark.parametrize("layout", ["pipeline.stages=4", "pipeline.replicas=2"])
def test_srun_trains_as_torchrun_does(
    slurm, torchrun, start, same_end, tiny, tmp_path, repository, layout
):
    """Five steps to the bit: under srun on two nodes, under torchrun, and in one process."""
    words = (*tiny, "train.steps=5", "model.num_layers=2", "model.dropout=0.1")
    srun = [sys.executable, "-m", "gpipe_hpc.train", *words, layout, f"run.dir={tmp_path}/srun"]
    slurm.run("srun", "--nodes=2", "--ntasks-per-node=2", "--ntasks=4", *srun, folder=tmp_path)
    env = {"PYTHONPATH": str(repository)}
    launch = ("--standalone", "--nproc_per_node=4")
    other = torchrun(launch, *words, layout, f"run.dir={tmp_path}/torchrun", env=env)
    assert other.wait() == 0, other.output
    same_end(tmp_path / "srun", tmp_path / "torchrun")
    if layout == "pipeline.stages=4":
        alone = start(*words, f"run.dir={tmp_path}/alone").wait(60)
        assert alone.code == 0, alone.output
        same_end(tmp_path / "srun", tmp_path / "alone")


def test_a_job_trains_to_the_end(slurm, edited, settings, tmp_path, as_undisturbed):
    """One start; what each rank said is in a file of its own."""
    job = slurm.submit(edited(settings, RUN_DIR="run"), *SIZE, folder=tmp_path)
    assert job.await_state("COMPLETED", "FAILED", limit_s=300) == "COMPLETED", said(tmp_path)
    assert starts(tmp_path) == [(0, "n1,n2")]
    ranks = sorted(tmp_path.glob("run/starts/*.rank*.txt"))
    assert [path.name for path in ranks] == [f"{job.number}.0.0.rank{r}.txt" for r in range(4)]
    assert f"step {STEPS}/{STEPS}" in ranks[0].read_text()
    as_undisturbed(tmp_path / "run")


def test_asked_to_stop_it_is_queued_again_and_goes_on(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    """SIGUSR1, as --signal sends it ahead of the time limit."""
    job = submitted(slurm, edited, settings, tmp_path, until)
    slurm.run("scancel", "--signal=USR1", job.number)
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "1"
    assert "stopped by SIGUSR1 after step" in said(tmp_path)
    first, second = starts(tmp_path)
    assert first[0] == 0 < second[0] < STEPS
    as_undisturbed(tmp_path / "run")


def test_a_preempted_job_goes_on(slurm, edited, settings, tmp_path, until, as_undisturbed):
    """A job of higher priority takes the nodes; ours ends by itself within its grace."""
    job = submitted(slurm, edited, settings, tmp_path, until)
    short = tmp_path / "short.sh"
    short.write_text("#!/bin/bash\nsleep 3\n")
    high = slurm.submit(short, "--partition=high", "--nodes=4", "--exclusive", folder=tmp_path)
    assert high.await_state("COMPLETED", limit_s=120) == "COMPLETED", said(tmp_path)
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "1"
    assert "stopped by SIGTERM after step" in said(tmp_path)
    assert len(starts(tmp_path)) == 2
    as_undisturbed(tmp_path / "run")


def test_where_preemption_cancels_a_job_goes_on_all_the_same(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    """PreemptMode=CANCEL: it is queued again within its grace, ahead of being cancelled."""
    job = submitted(slurm, edited, settings, tmp_path, until, "--partition=gone")
    short = tmp_path / "short.sh"
    short.write_text("#!/bin/bash\nsleep 3\n")
    slurm.submit(short, "--partition=high", "--nodes=4", "--exclusive", folder=tmp_path)
    ends = ("COMPLETED", "FAILED", "PREEMPTED", "CANCELLED")
    assert job.await_state(*ends, limit_s=400) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "1"
    assert "stopped by SIGTERM after step" in said(tmp_path)
    as_undisturbed(tmp_path / "run")


ENDLESS = ("train.steps=1000000", "checkpoint.every=1000")


@pytest.mark.parametrize("ahead", [True, False], ids=["near", "at"])
def test_a_job_whose_time_is_up_saves_and_goes_on(slurm, edited, settings, tmp_path, until, ahead):
    """By USR1 that --signal asks for, and by TERM and KillWait alone, at the limit."""
    script = edited((*settings, *ENDLESS), RUN_DIR="run")
    if not ahead:
        text, count = re.subn(r"^#SBATCH --signal=.*\n", "", script.read_text(), flags=re.M)
        assert count == 1
        script.write_text(text)
    limit = ("--time=2", "--signal=USR1@30") if ahead else ("--time=1",)
    job = slurm.submit(script, *SIZE, *limit, folder=tmp_path)
    until(lambda: has_begun(tmp_path / "run", 40), 100, f"it trained: {said(tmp_path)}")
    until(lambda: job.told("JobState") == "PENDING", 300, f"it was queued: {said(tmp_path)}")
    how = "SIGUSR1" if ahead else "SIGTERM"
    assert f"stopped by {how} after step" in said(tmp_path)
    assert "stopped by a signal at step" in said(tmp_path)
    job.await_state("RUNNING", limit_s=200)
    until(lambda: len(starts(tmp_path)) == 2, 200, f"it went on: {said(tmp_path)}")
    assert starts(tmp_path)[1][0] > 0
    assert job.told("Restarts") == "1"


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(
    slurm, edited, settings, tmp_path, until
):
    """A plain scancel sends SIGTERM to the ranks, and leaves them KillWait."""
    job = submitted(slurm, edited, (*settings, *ENDLESS), tmp_path, until)
    slurm.run("scancel", job.number)
    assert job.await_state("CANCELLED", "PENDING") == "CANCELLED", said(tmp_path)
    assert job.told("Restarts") == "0"
    assert "cancelled, so not queued again" in said(tmp_path)
    assert [path.name for path in tmp_path.glob("run/checkpoints/step_*")], said(tmp_path)
    assert "stopped by SIGTERM after step" in said(tmp_path) and len(starts(tmp_path)) == 1


def test_a_signal_in_the_preflight_is_heeded(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    """The script lost it, and trained on towards its limit."""
    script = edited(settings, RUN_DIR="run", PREFLIGHT="true")
    job = slurm.submit(script, *SIZE, folder=tmp_path)
    began = tmp_path / "run" / "starts" / f"{job.number}.0.0.preflight.rank3.txt"
    until(began.exists, 120, f"the preflight ran: {said(tmp_path)}")
    slurm.run("scancel", "--signal=USR1", job.number)
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED", said(tmp_path)
    assert "asked to stop while the preflight ran: queued again" in said(tmp_path)
    assert job.told("Restarts") == "1" and "preflight ended with code 0" in said(tmp_path)
    as_undisturbed(tmp_path / "run")


def test_a_killed_task_starts_again_on_the_same_nodes(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    """Only a signal left a mark to go on by: after kill -9 of one rank the job had failed."""
    job = submitted(slurm, edited, settings, tmp_path, until)
    os.kill(slurm.tasks(job)[2], signal.SIGKILL)
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "0"
    (step, nodes), (again, same_nodes) = starts(tmp_path)
    assert step == 0 < again < STEPS
    assert nodes == same_nodes == "n1,n2"
    # How it ended only Slurm knows for sure: it may have asked the kernel ahead of our watcher.
    assert "rank 2 on" in said(tmp_path) and "task 2: Killed" in said(tmp_path)
    as_undisturbed(tmp_path / "run")


def test_a_lost_node_leaves_the_others_going_on(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    """The two ranks of the node that is left take all layers; the losses stay the same bits."""
    job = submitted(slurm, edited, settings, tmp_path, until)
    slurm.lose("n2")
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "0"
    (_, both), (again, left) = starts(tmp_path)
    assert (both, left) == ("n1,n2", "n1") and 0 < again < STEPS
    assert "2 ranks on n1" in said(tmp_path)
    as_undisturbed(tmp_path / "run")


def test_a_lost_node_takes_no_replica_with_it(
    slurm, edited, settings, tmp_path, until, start_ranks
):
    """Stages and replicas as the script has them, as numbers: the micro-batches stay the same."""
    own = (*settings, "pipeline.stages=2", "pipeline.replicas=2")
    job = submitted(slurm, edited, own, tmp_path, until)
    slurm.lose("n2")
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED", said(tmp_path)
    (_, both), (again, left) = starts(tmp_path)
    assert (both, left) == ("n1,n2", "n1") and 0 < again < STEPS
    assert "4 ranks before, 2 now" in said(tmp_path)
    ranks = start_ranks(4, *own, f"run.dir={tmp_path}/undisturbed").wait(200)
    assert ranks.codes == [0] * 4, ranks.outputs
    found, undisturbed = losses(tmp_path / "run"), losses(tmp_path / "undisturbed")
    assert len(found) == len(undisturbed) == STEPS
    # Fewer ranks sum in another order; other dropout would show in the second digit.
    assert found == pytest.approx(undisturbed, rel=1e-4)


def test_with_too_few_nodes_left_it_waits_for_others(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    job = submitted(slurm, edited, settings, tmp_path, until, MIN_NODES=2)
    slurm.lose("n2")
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "1"
    assert "of its nodes only 'n1' answer" in said(tmp_path)
    first, second = (nodes.split(",") for _, nodes in starts(tmp_path))
    assert first == ["n1", "n2"] and len(second) == 2 and "n2" not in second
    as_undisturbed(tmp_path / "run")


def test_a_lost_first_node_is_replaced(slurm, edited, settings, tmp_path, until, as_undisturbed):
    """It runs the script: without it the job did nothing until its time limit."""
    job = submitted(slurm, edited, settings, tmp_path, until)
    slurm.lose("n1")
    assert job.await_state("COMPLETED", "FAILED", limit_s=500) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "1"
    first, second = (nodes.split(",") for _, nodes in starts(tmp_path))
    assert first == ["n1", "n2"] and len(second) == 2 and "n1" not in second
    told = (tmp_path / "run" / "starts" / f"{job.number}.0.guard_n2.txt").read_text()
    assert "lost its first node n1: queued again" in told
    as_undisturbed(tmp_path / "run")


# Two ranks fill a node: a job that asks for more cores than fewer nodes have would not start there.
WHOLE_NODES = ("--cpus-per-task=4",)


def test_without_a_spare_for_its_first_node_it_goes_on_with_fewer(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    """The job was queued again for two nodes, and waited for ever for the one that was lost."""
    options = (*WHOLE_NODES, "--exclude=n3,n4")
    job = submitted(slurm, edited, settings, tmp_path, until, *options, WAIT_FOR_NODES=5)
    slurm.lose("n1")
    assert job.await_state("COMPLETED", "FAILED", limit_s=500) == "COMPLETED", said(tmp_path)
    assert job.told("Restarts") == "1"
    assert [nodes for _, nodes in starts(tmp_path)] == ["n1,n2", "n2"]
    as_undisturbed(tmp_path / "run")


def test_with_two_of_three_nodes_lost_it_goes_on_with_the_third(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    options = ("--nodes=3", "--ntasks-per-node=1", "--exclude=n4")
    job = submitted(slurm, edited, settings, tmp_path, until, *options, WAIT_FOR_NODES=5)
    slurm.lose("n3")
    slurm.lose("n1")
    assert job.await_state("COMPLETED", "FAILED", limit_s=500) == "COMPLETED", said(tmp_path)
    assert [nodes for _, nodes in starts(tmp_path)][-1] == "n2"
    as_undisturbed(tmp_path / "run")


def test_a_node_that_is_back_in_time_is_used(
    slurm, edited, settings, tmp_path, until, as_undisturbed
):
    options = (*WHOLE_NODES, "--exclude=n3,n4")
    job = submitted(slurm, edited, settings, tmp_path, until, *options, WAIT_FOR_NODES=600)
    slurm.lose("n1")
    job.await_state("PENDING", limit_s=200)
    slurm.bring_back("n1")
    assert job.await_state("COMPLETED", "FAILED", limit_s=500) == "COMPLETED", said(tmp_path)
    assert [nodes for _, nodes in starts(tmp_path)] == ["n1,n2", "n1,n2"], said(tmp_path)
    assert not list(tmp_path.glob("run/starts/*.SHORT"))
    as_undisturbed(tmp_path / "run")


def test_queued_again_it_asks_for_all_nodes_and_cancelled_it_is_not_queued_again(
    slurm, edited, settings, tmp_path, until
):
    """Both were wrong: a job that went on with fewer kept to them, and cancelled jobs came back."""
    options = (*WHOLE_NODES, "--exclude=n3,n4")
    settings = (*settings, "train.steps=1000000", "checkpoint.every=1000")
    job = submitted(slurm, edited, settings, tmp_path, until, *options, WAIT_FOR_NODES=5)
    slurm.lose("n2")
    until(lambda: len(starts(tmp_path)) == 2, 200, f"it went on with n1: {said(tmp_path)}")
    slurm.bring_back("n2")
    until(lambda: slurm.states()["n2"] == "idle", 90, "n2 was back")
    second = tmp_path / "run" / "starts" / f"{job.number}.0.1.rank0.txt"
    until(
        lambda: second.exists() and "step " in second.read_text(),
        200,
        f"it trained: {said(tmp_path)}",
    )
    slurm.run("scancel", "--signal=USR1", job.number)
    until(lambda: job.told("JobState") == "PENDING", 200, f"it was queued: {said(tmp_path)}")
    until(lambda: job.told("NumTasks") == "4", 90, f"it asked for all: {said(tmp_path)}")
    job.await_state("RUNNING", limit_s=200)
    until(lambda: len(slurm.tasks(job)) == 4, 200, f"all ranks ran: {said(tmp_path)}")
    assert [nodes for _, nodes in starts(tmp_path)] == ["n1,n2", "n1", "n1,n2"]
    slurm.run("scancel", "--full", job.number)
    assert job.await_state("CANCELLED", "PENDING", limit_s=200) == "CANCELLED", said(tmp_path)
    assert job.told("Restarts") == "1"


def test_it_grows_again_when_a_lost_node_is_back(slurm, edited, settings, tmp_path, until):
    """A job that went on with fewer nodes kept to them until something else ended it."""
    options = (*WHOLE_NODES, "--exclude=n3,n4")
    settings = (*settings, "train.steps=1000000", "checkpoint.every=1000")
    job = submitted(slurm, edited, settings, tmp_path, until, *options, GROW_AFTER=45)
    slurm.lose("n2")
    until(lambda: len(starts(tmp_path)) == 2, 200, f"it went on with n1: {said(tmp_path)}")
    slurm.bring_back("n2")
    until(lambda: job.told("JobState") == "PENDING", 200, f"it was queued: {said(tmp_path)}")
    assert "nodes n2 are back: asks the ranks to stop" in said(tmp_path)
    # After a step, or ahead of the first where a machine takes so long to start.
    assert "stopped by SIGUSR1" in said(tmp_path)
    until(lambda: job.told("NumTasks") == "4", 90, f"it asked for all: {said(tmp_path)}")
    job.await_state("RUNNING", limit_s=200)
    until(lambda: len(slurm.tasks(job)) == 4, 200, f"all ranks ran: {said(tmp_path)}")
    assert [nodes for _, nodes in starts(tmp_path)] == ["n1,n2", "n1", "n1,n2"]


def test_ranks_are_looked_at_first_and_a_job_of_unfit_ones_stops(slurm, edited, settings, tmp_path):
    """Fit ones leave links.yaml in the run folder; unfit ones are not queued again."""
    script = edited((*settings, "train.stop_at=2"), RUN_DIR="run", PREFLIGHT="true")
    job = slurm.submit(script, *SIZE, folder=tmp_path)
    assert job.await_state("COMPLETED", "FAILED", limit_s=300) == "COMPLETED", said(tmp_path)
    assert "preflight ended with code 0" in said(tmp_path)
    assert (tmp_path / "run" / "links.yaml").exists() and has_begun(tmp_path / "run", 0)
    script = edited((*settings, "pipeline.replicas=3"), RUN_DIR="unfit", PREFLIGHT="true")
    job = slurm.submit(script, *SIZE, folder=tmp_path)
    assert job.await_state("COMPLETED", "FAILED", limit_s=300) == "FAILED", said(tmp_path)
    assert job.told("ExitCode") == "2:0" and job.told("Restarts") == "0"
    assert "stops: these ranks are not fit" in said(tmp_path)
    assert not (tmp_path / "unfit" / "metrics.jsonl").exists()


DYING = """
import os
import signal
from pathlib import Path

from torch import nn

from gpipe_hpc import LayerSpec


class Dying(nn.Linear):
    def forward(self, x):
        path = Path("run/metrics.jsonl")
        if path.exists() and len(path.read_text().splitlines()) >= 25:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def build():
    return [LayerSpec(Dying, 4, 4) for _ in range(4)]
"""


def test_a_crash_that_comes_again_at_the_same_step_stops_the_job(
    slurm, edited, tmp_path, repository
):
    """The first crash came past new checkpoints; the three behind it did not."""
    (tmp_path / "mine.py").write_text(DYING)
    settings = (
        *("model=own", "model._target_=mine.build", "data=synthetic_vectors", "data.width=4"),
        *("train.batch_size=8", "pipeline.microbatches=2", "pipeline.partition=parameters"),
        *("train.validate_every=0", "checkpoint.every=10", "data.num_classes=4"),
    )
    script = edited(settings, f"export PYTHONPATH={tmp_path}:{repository}", RUN_DIR="run")
    job = slurm.submit(script, *SIZE, folder=tmp_path)
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "FAILED", said(tmp_path)
    assert job.told("ExitCode") == "1:0" and job.told("Restarts") == "0"
    assert [step for step, _ in starts(tmp_path)] == [0, 20, 20, 20], said(tmp_path)
    assert "stops: 3 starts in a row ended without a checkpoint past step 20" in said(tmp_path)


def test_a_run_is_started_only_so_often(slurm, edited, settings, tmp_path):
    script = edited(settings, RUN_DIR="run", MAX_STARTS=7)
    (tmp_path / "run" / "starts").mkdir(parents=True)
    before = "".join(f"start {step} 1.0.{step} then n1,n2\n" for step in range(7))
    (tmp_path / "run/starts/starts.txt").write_text(before)
    job = slurm.submit(script, *SIZE, folder=tmp_path)
    assert job.await_state("COMPLETED", "FAILED") == "FAILED"
    assert "stops: started 7 times, expected 7 at most" in said(tmp_path)
    assert (tmp_path / "run/starts/starts.txt").read_text() == before


def test_settings_that_cannot_work_are_tried_once(slurm, edited, settings, tmp_path):
    script = edited((*settings, "pipeline.replicas=3"), RUN_DIR="run")
    job = slurm.submit(script, *SIZE, folder=tmp_path)
    assert job.await_state("COMPLETED", "FAILED", limit_s=200) == "FAILED"
    assert job.told("ExitCode") == "2:0", said(tmp_path)
    assert len(starts(tmp_path)) == 1
    named = re.search(r"see (run/starts/\S+\.txt)", said(tmp_path))
    assert named and "replicas" in (tmp_path / named[1]).read_text()
    assert_is_left_to_its_user(job, tmp_path)


def assert_is_left_to_its_user(job, folder):
    """Nothing starts it again, and what is submitted later counts no crash."""
    assert job.told("Restarts") == "0"
    assert (folder / "run/starts/starts.txt").read_text().splitlines()[-1] == "stop"


def test_a_run_that_comes_to_nan_is_tried_once(slurm, edited, settings, tmp_path):
    """From the same checkpoint it would come to the same NaN; submitted again it is refused."""
    words = (*settings, "optimizer.lr=1e30", "lr.warmup_steps=0")
    script = edited(words, RUN_DIR="run")
    for number in (1, 2):
        job = slurm.submit(script, *SIZE, folder=tmp_path)
        assert job.await_state("COMPLETED", "FAILED", limit_s=300) == "FAILED"
        assert job.told("ExitCode") == "4:0", said(tmp_path)
        assert len(starts(tmp_path)) == number
        assert_is_left_to_its_user(job, tmp_path)
    ranks = sorted(tmp_path.glob(f"run/starts/{job.number}.0.0.rank*.txt"))
    assert len(ranks) == 4 and all("run/NON_FINITE" in each.read_text() for each in ranks)


GATE = """
if [[ $SLURM_PROCID == 0 ]]; then
    kill -TERM $$
fi
sleep 2
exit 1
"""


def test_a_rank_that_somebody_ends_before_the_ranks_meet_is_no_request_to_stop(
    slurm, edited, settings, tmp_path
):
    """As a service does where memory runs out: the job was queued again each time."""
    (tmp_path / "gate.sh").write_text(GATE)
    script = edited(settings, RUN_DIR="run", MAX_CRASHES=1, INSIDE="(bash gate.sh)")
    job = slurm.submit(script, *SIZE, folder=tmp_path)
    assert job.await_state("COMPLETED", "FAILED", limit_s=300) == "FAILED", said(tmp_path)
    assert job.told("ExitCode") == "1:0" and job.told("Restarts") == "0", said(tmp_path)
    assert "ended with code 143" in said(tmp_path), said(tmp_path)
    assert "stops: 1 starts in a row ended without a checkpoint past step 0" in said(tmp_path)


@pytest.fixture
def submitit():
    """Fail at once where a sweep would start no job."""
    found = importlib.util.find_spec("submitit")
    assert found is not None, "cluster tests: pip install hydra-submitit-launcher"


@pytest.mark.usefixtures("submitit")
def test_a_sweep_is_a_job_for_each_of_its_runs(slurm, tiny, tmp_path, train, same_end):
    """By submitit: two jobs of two ranks each, as they would be alone; what failed is named."""
    words = [*tiny, "train.steps=5", "pipeline.stages=2"]
    sweep = ["optimizer.lr=0.001,0.01", "run.dir=runs/${optimizer.lr}"]
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=2"]
    command = [sys.executable, "-m", "gpipe_hpc.train", "-m", *words, *sweep, *launcher]
    said = slurm.run(*command, folder=tmp_path)
    assert "2 jobs with submitit_slurm" in said
    for rate in ("0.001", "0.01"):
        train(2, *words, f"optimizer.lr={rate}", f"run.dir=alone/{rate}")
        same_end(tmp_path / "runs" / rate, tmp_path / "alone" / rate)


@pytest.mark.usefixtures("submitit")
def test_a_job_of_a_sweep_that_is_stopped_goes_on(slurm, settings, tmp_path, until, as_undisturbed):
    """Slurm starts it again, and the sweep waits for that."""
    script = tmp_path / "sweep.sh"
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=2"]
    words = [sys.executable, "-m", "gpipe_hpc.train", "-m", *settings, "run.dir=run", *launcher]
    script.write_text(f"#!/bin/bash\n{shlex.join(words)}\n")
    sweep = slurm.submit(script, "--output=gpipe-hpc-sweep.txt", "--time=30", folder=tmp_path)
    until(lambda: has_begun(tmp_path / "run", 40), 200, f"it trained: {said(tmp_path)}")
    jobs = slurm.run("squeue", "-h", "-o", "%A %T").split("\n")
    (number,) = {line.split()[0] for line in jobs if line} - {sweep.number}
    job = BatchJob(slurm, number)
    slurm.run("scancel", "--signal=USR2", number)  # as submitit lets Slurm send ahead of the limit
    until(lambda: job.told("Restarts") == "1", 60, "it was queued again")
    assert job.await_state("COMPLETED", "FAILED", limit_s=400) == "COMPLETED"
    assert sweep.await_state("COMPLETED", "FAILED", limit_s=200) == "COMPLETED", said(tmp_path)
    as_undisturbed(tmp_path / "run")
