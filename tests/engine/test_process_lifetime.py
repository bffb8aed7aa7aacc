"""Several pipelines in one process: release of their resources, and failures of earlier ones."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import ActionError, DataError, PeerError, ScheduleError
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest

INPUTS, TARGETS = torch.arange(16.0).reshape(4, 4), torch.tensor([0, 1, 2, 0])


def build(loss_fn=F.cross_entropy, shares_memory=True, **settings):
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 3)]
    world = start_world(shares_memory=shares_memory)
    return Pipeline(layers, loss_fn, microbatches=2, world=world, **settings)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_dropped_pipeline_closes_groups_threads_and_files(
    processes, tmp_path, until, shares_memory
):
    """Regression: each pipeline leaked 21 file descriptors, 13 threads and 4 process groups."""

    def num_open():
        names = [t.name for t in threading.enumerate()]
        groups = len(torch.distributed.distributed_c10d._world.pg_map)
        threads = sum(name in ("failure-watch", "outbox") for name in names)
        return groups, threads + len(children())

    def children():
        """Return the child processes of this process, such as the watchdog."""
        listed = Path("/proc/self/task").glob("*/children")
        return [pid for path in listed for pid in path.read_text().split()]

    def body(rank):
        build(shares_memory=shares_memory).step(INPUTS, TARGETS)
        gc.collect()
        until(lambda: num_open() == (1, 0), 20, "the first one is gone")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            build(shares_memory=shares_memory).step(INPUTS, TARGETS)
        gc.collect()
        until(lambda: num_open() == (1, 0), 20, "its threads have ended")
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, 20, "its files are closed")
        return True

    assert processes(2, body, tmp_path) == [True, True]


def test_dropped_pipeline_of_one_rank_closes_its_files(processes, tmp_path, until):
    """Regression: each pipeline left the file open in which a rank publishes its actions."""

    def body(rank):
        build().step(INPUTS, TARGETS)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            build().step(INPUTS, TARGETS)
        gc.collect()
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, 20, "its files are closed")
        return True

    assert processes(1, body, tmp_path) == [True]


def test_training_run_forms_only_the_groups_of_its_pipeline(processes, tmp_path):
    """Regression: the trainer formed two more groups of all ranks, with six polling threads."""
    settings = ("train.steps=1", "train.validate_every=0", "pipeline.partition=parameters")
    data = ("model=mlp", "data=synthetic_vectors", "pipeline.microbatches=2")
    config = compose_config([*data, *settings, f"run.dir={tmp_path}/run"])

    def body(rank):
        world = start_world()
        groups = torch.distributed.distributed_c10d._world.pg_map
        before = len(groups)
        assert run_training(config, world, StopRequest()) == 0
        return before, len(groups)

    # The groups of the user and of the world; afterwards also that of the pipeline.
    assert processes(2, body, tmp_path) == [(2, 3), (2, 3)]


def test_new_pipeline_trains_after_a_refused_one(processes, tmp_path):
    """Regression: the first pipeline's error report stayed in the store and stopped the second."""

    def body(rank):
        # Rank 0 builds the layout and raises the error; rank 1 receives its report.
        refusal = PeerError if rank else ScheduleError
        with pytest.raises(refusal, match="unknown name"):
            build(schedule="unknown")
        pipe = build()
        losses = [pipe.step(INPUTS, TARGETS).loss]
        threading.Event().wait(2.0)  # longer than the watchdog needs to act on a report
        return [*losses, pipe.step(INPUTS, TARGETS).loss]

    for first, second in processes(2, body, tmp_path):
        assert first == second


def test_new_pipeline_trains_after_a_failed_step(processes, tmp_path):
    def refuse(output, target):
        raise ValueError("refused")

    def body(rank):
        with pytest.raises((ActionError, PeerError), match="ValueError: refused"):
            build(refuse).step(INPUTS, TARGETS)
        return build().step(INPUTS, TARGETS).loss

    first, second = processes(2, body, tmp_path)
    assert first == second


def test_rank_that_fails_before_building_its_pipeline_stops_others(processes, tmp_path):
    """Regression: others waited until the timeout for the failed rank to join their groups."""

    def body(rank):
        if rank == 0:
            with pytest.raises(DataError), collective_errors(start_world(), "opening the run"):
                raise DataError("data: gone")
        else:
            with pytest.raises(PeerError, match=r"rank 0 on \S+: data: gone"):
                build()
        return True

    assert processes(2, body, tmp_path) == [True, True]
