"""Detection by other ranks that a process ended, hangs, or is still healthy."""

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.comm.watchdog.activity import ActivityTracker, Phase
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import PeerError

INPUTS, TARGETS = torch.arange(16.0).reshape(4, 4), torch.tensor([0, 1, 2, 0])


def build(**settings):
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 3)]
    return Pipeline(layers, F.cross_entropy, microbatches=2, **settings)


def sockets():
    """Return the Unix sockets of this process, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                duplicate = socket.socket(fileno=os.dup(int(name)))
                if duplicate.family == socket.AF_UNIX:
                    found[int(name)] = target
                duplicate.close()
        except OSError:
            continue
    return found


def test_forked_process_inherits_no_connection_of_its_parent(processes, tmp_path):
    """Regression: the child kept connections of a dead rank open, so others continued to wait."""

    def body(rank):
        before = sockets()
        pipe = build()
        first = pipe.step(INPUTS, TARGETS).loss
        own = set(sockets().items()) - set(before.items())
        assert own, "the pipeline opened no connection"
        pid = os.fork()
        if pid == 0:
            os._exit(len(own & set(sockets().items())))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        time.sleep(1.0)
        return first == pipe.step(INPUTS, TARGETS).loss

    assert processes(2, body, tmp_path) == [True, True]


def test_forked_process_that_closes_its_world_does_not_end_its_parent(processes, tmp_path):
    """Regression: the child ran its parent's clean-up, so others treated the parent as gone."""

    def body(rank):
        pipe = build(silence_s=4.0)
        if rank == 1:
            pid = os.fork()
            if pid == 0:
                pipe.world.close()
                os._exit(0)
            os.waitpid(pid, 0)
        time.sleep(1.5)
        return pipe.step(INPUTS, TARGETS).loss > 0

    assert processes(2, body, tmp_path) == [True, True]


def test_rank_that_ends_after_its_work_is_not_reported_as_failed(processes, tmp_path):
    """Processes started by Python's multiprocessing end without running exit handlers."""

    def body(rank):
        pipe = build(silence_s=3.0)
        loss = pipe.step(INPUTS, TARGETS).loss
        if rank == 1:
            time.sleep(5.0)
            pipe.world._board.await_spreading()
            assert pipe.world._board._report is None
        return loss > 0

    assert processes(2, body, tmp_path) == [True, True]


def test_waiting_rank_names_rank_that_hangs_before_its_pipeline(processes, tmp_path, until):
    """Regression: all ranks were reported as alive, including the one that blocked the others."""

    def body(rank):
        world = start_world(timeout_s=4.0)
        if rank == 0:
            until((tmp_path / "done").exists, 40, "the other has given up")
            return "late"
        with pytest.raises(PeerError) as caught:
            build(world=world)
        (tmp_path / "done").touch()
        return str(caught.value)

    late, message = processes(2, body, tmp_path)
    assert late == "late"
    assert "rank 0" in message and "no progress" in message and "joining the other ranks" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_wait_in_torch_collective_counts_as_waiting_for_others(processes, tmp_path, until, rank):
    """For example in checkpoints, which use torch's own collectives."""

    def body(own):
        seen = []
        if own == rank:
            tracker = ActivityTracker(600.0, None)
            tracker.note(Phase("saving"))
            thread = threading.Thread(target=lambda: seen.append(watch(tracker)))
            assert not tracker.waits
            thread.start()
            dist.all_gather_object([None, None], own)
            thread.join()
        else:
            threading.Event().wait(1.0)
            dist.all_gather_object([None, None], own)
        return seen

    def watch(tracker):
        until(lambda: tracker.waits, 20, "the other thread waits")
        return True

    assert processes(2, body, tmp_path)[rank] == [True]


class FakeAccelerator(HostDevice):
    """Host device that presents itself as an accelerator."""

    is_accelerator = True


def test_computing_rank_raises_error_of_failed_rank_when_its_step_ends(processes, tmp_path):
    """Regression: the rank ran its optimizer with gradients that an abort may have corrupted."""

    def body(rank):
        world = start_world(timeout_s=30.0)
        world.device = FakeAccelerator()
        if rank == 1:
            with pytest.raises(ValueError, match="broken"), collective_errors(world, "step 7"):
                raise ValueError("broken on purpose")
            return "failed"
        with pytest.raises(PeerError) as caught, collective_errors(world, "step 7"):
            for _ in range(200):  # computes
                time.sleep(0.02)
        return str(caught.value)

    received, message = processes(2, body, tmp_path)
    named = f"rank 1 on {socket.gethostname()}: step 7: ValueError: broken on purpose"
    assert (received, message) == (named, "failed")
