"""Pipelines come and go within one process, and one that failed does not spoil the next."""

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
def test_a_dropped_pipeline_leaves_nothing_open(processes, tmp_path, until, shares_memory):
    """Each left 21 descriptors, 13 threads and 4 groups behind: some fifty were the end."""

    def still_open():
        names = [t.name for t in threading.enumerate()]
        groups = len(torch.distributed.distributed_c10d._world.pg_map)
        threads = sum(name in ("failure-watch", "outbox") for name in names)
        return groups, threads + len(children())

    def children():
        """Return the processes that this one has started: the watcher's, if it is there."""
        listed = Path("/proc/self/task").glob("*/children")
        return [pid for path in listed for pid in path.read_text().split()]

    def body(rank):
        build(shares_memory=shares_memory).step(INPUTS, TARGETS)
        gc.collect()
        until(lambda: still_open() == (1, 0), 20, "the first one is gone")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            build(shares_memory=shares_memory).step(INPUTS, TARGETS)
        gc.collect()
        until(lambda: still_open() == (1, 0), 20, "its threads have ended")
        until(lambda: len(os.listdir("/proc/self/fd")) <= before, 20, "its files are closed")
        return True

    assert processes(2, body, tmp_path) == [True, True]


def test_a_group_of_one_leaves_no_file_open(processes, tmp_path, until):
    """Each left the file open in which it showed its actions to nobody."""

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


def test_a_training_run_has_the_groups_of_its_pipeline(processes, tmp_path):
    """The trainer formed two more of all ranks, each three threads that wake up all the time."""
    settings = ("train.steps=1", "train.validate_every=0", "pipeline.partition=parameters")
    data = ("model=mlp", "data=synthetic_vectors", "pipeline.microbatches=2")
    config = compose_config([*data, *settings, f"run.dir={tmp_path}/run"])

    def body(rank):
        world = start_world()
        groups = torch.distributed.distributed_c10d._world.pg_map
        before = len(groups)
        assert run_training(config, world, StopRequest()) == 0
        return before, len(groups)

    # The user's, the world's, then the pipeline's.
    assert processes(2, body, tmp_path) == [(2, 3), (2, 3)]


def test_after_a_refused_pipeline_another_one_runs(processes, tmp_path):
    """The first one's report stayed in the store, and the second took it for its own."""

    def body(rank):
        # Rank 0 lays out, and so it is the one that refuses; the other is told.
        refusal = PeerError if rank else ScheduleError
        with pytest.raises(refusal, match="unknown name"):
            build(schedule="unknown")
        pipe = build()
        losses = [pipe.step(INPUTS, TARGETS).loss]
        threading.Event().wait(2.0)  # longer than the watch takes to act on a report
        return [*losses, pipe.step(INPUTS, TARGETS).loss]

    for first, second in processes(2, body, tmp_path):
        assert first == second


def test_after_a_failed_step_a_new_pipeline_runs(processes, tmp_path):
    def refuse(output, target):
        raise ValueError("refused")

    def body(rank):
        with pytest.raises((ActionError, PeerError), match="ValueError: refused"):
            build(refuse).step(INPUTS, TARGETS)
        return build().step(INPUTS, TARGETS).loss

    first, second = processes(2, body, tmp_path)
    assert first == second


def test_a_rank_that_fails_ahead_of_its_pipeline_stops_the_others(processes, tmp_path):
    """They waited in the store for its part in their groups, until all of the timeout was over."""

    def body(rank):
        if rank == 0:
            with pytest.raises(DataError), collective_errors(start_world(), "opening the run"):
                raise DataError("data: gone")
        else:
            with pytest.raises(PeerError, match=r"rank 0 on \S+: data: gone"):
                build()
        return True

    assert processes(2, body, tmp_path) == [True, True]
