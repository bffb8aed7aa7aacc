"""The image, built and run: hardened, and with a container for each rank."""

import os
import signal

import pytest

from tests.cluster.containers import IMAGE
from tests.support import has_begun, losses

# The first of them builds the image.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

DIVIDED = "cannot share memory with rank"


@pytest.fixture
def settings(tiny):
    return (*tiny, "train.steps=20")


@pytest.fixture
def folder(tmp_path):
    """Return a folder that the image's user, whose number nobody has here, may write to."""
    path = tmp_path / "work"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def as_outside(settings, start, tmp_path):
    """Return a function that holds a run against one process outside of containers."""

    def compare(run):
        alone = start(*settings, f"run.dir={tmp_path}/alone").wait(120)
        assert alone.code == 0, alone.output
        assert losses(run) == losses(tmp_path / "alone")

    return compare


@pytest.fixture
def rank_in_its_own(containers, free_port, folder, settings):
    """Return a function that starts each of two ranks in a container, as a task of srun does."""
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_JOB_NODELIST": "node1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }

    def launch(*options, words=()):
        train = ["-m", "gpipe_hpc.train", *settings, "run.dir=/work/run", *words]
        return [
            containers.start(
                folder.parent / f"rank{rank}.txt",
                *("--network=host", f"--volume={folder}:/work", "--entrypoint=python", *options),
                *(f"--env={name}={value}" for name, value in job.items()),
                *(f"--env=SLURM_PROCID={rank}", f"--env=SLURM_LOCALID={rank}"),
                *(IMAGE, *train),
            )
            for rank in range(2)
        ]

    return launch


def test_two_ranks_train_in_a_hardened_container(containers, folder, settings, as_outside):
    """No root, no capability, nothing to write to but /work and /tmp, no network, 64 MB shared."""
    said = containers.output(
        *("--network=none", f"--volume={folder}:/work", "--tmpfs=/tmp", "--env=OMP_NUM_THREADS=1"),
        *(IMAGE, "--standalone", "--nproc_per_node=2", "-m", "gpipe_hpc.train", *settings),
        "run.dir=/work/run",
    )
    assert "step 20/20" in said
    assert DIVIDED not in said and "no secret" not in said
    assert (folder / "run" / "config.yaml").stat().st_uid == 10001
    as_outside(folder / "run")


def test_a_crashed_container_starts_again_and_a_stopped_one_goes_on(
    containers, folder, tiny, start, tmp_path, until
):
    """In Debian 12 no checkpoint could be read: each start after the first one failed."""
    run, steps = folder / "run", ("train.steps=1500", "checkpoint.every=50")
    container = containers.keep(
        *("--restart=on-failure:5", "--stop-timeout=60", "--tmpfs=/tmp", "--network=none"),
        *(f"--volume={folder}:/work", "--env=OMP_NUM_THREADS=1", IMAGE, "--standalone"),
        *("--nproc_per_node=2", "--shutdown-timeout=50", "-m", "gpipe_hpc.train", *tiny, *steps),
        "run.dir=/work/run",
    )
    until(lambda: has_begun(run, 60), 120, "it trained")
    os.kill(container.processes("gpipe_hpc.train")[1], signal.SIGKILL)
    until(lambda: "resumed from" in container.output, 120, "it started again")
    assert container.state.endswith(" 1")
    until(lambda: has_begun(run, 120), 120, "it trained again")
    container.stop()
    reached = int((run / "REQUEUE").read_text())
    assert 120 <= reached < 1500
    container.start()
    until(lambda: container.state.startswith("exited 0"), 120, "it was done")
    alone = start(*tiny, *steps, f"run.dir={tmp_path}/alone").wait(120)
    assert alone.code == 0, alone.output
    assert losses(run) == losses(tmp_path / "alone")


def test_ranks_in_containers_of_their_own_say_that_they_share_nothing(
    rank_in_its_own, folder, as_outside
):
    """Each made a secret of its own, so they refused each other; and nobody said what was slow."""
    ranks = rank_in_its_own("--tmpfs=/tmp")
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(r.output for r in ranks)
    assert "no secret" in ranks[0].output
    assert f"rank 0: {DIVIDED} 1 of this machine" in (folder / "run/logs/rank0.log").read_text()
    assert f"rank 1: {DIVIDED} 0 of this machine" in (folder / "run/logs/rank1.log").read_text()
    as_outside(folder / "run")


def test_ranks_in_containers_that_share_a_folder_share_memory(
    rank_in_its_own, folder, as_outside, tmp_path
):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    ranks = rank_in_its_own(f"--volume={shared}:/tmp")
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(r.output for r in ranks)
    logs = [path.read_text() for path in sorted((folder / "run" / "logs").iterdir())]
    assert len(logs) == 2 and not any(DIVIDED in text for text in logs)
    as_outside(folder / "run")


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "apart"])
def test_a_killed_container_is_told_of(rank_in_its_own, folder, tmp_path, until, shares):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    tmp = f"--volume={tmp_path}/shared:/tmp" if shares else "--tmpfs=/tmp"
    ranks = rank_in_its_own(tmp, words=["train.steps=100000"])
    metrics = folder / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, 180, "it trained")
    ranks[1].kill()
    assert ranks[0].wait(40) == 1
    assert "rank 1 on" in ranks[0].output and "died" in ranks[0].output
