"""What the others learn when a rank of real processes ends, hangs, or only seems to."""

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
    """Return the sockets of this process that have an address or a path, Gloo's aside."""
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


def test_a_forked_process_holds_no_connection_of_its_parent(processes, tmp_path):
    """It kept those of a rank that had died open, and the others went on waiting."""

    def body(rank):
        before = sockets()
        pipe = build()
        first = pipe.step(INPUTS, TARGETS).loss
        own = set(sockets().items()) - set(before.items())
        assert own, "the watcher's and the channels'"
        pid = os.fork()
        if pid == 0:
            os._exit(len(own & set(sockets().items())))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        time.sleep(1.0)
        return first == pipe.step(INPUTS, TARGETS).loss

    assert processes(2, body, tmp_path) == [True, True]


def test_a_forked_process_that_ends_in_good_order_says_no_farewell_for_its_parent(
    processes, tmp_path
):
    """It ran its parent's clean-up, and the others took the parent for gone."""

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


def test_a_rank_that_has_done_its_part_and_ended_is_not_missed(processes, tmp_path):
    """Processes that Python's multiprocessing starts end without what runs at exit."""

    def body(rank):
        pipe = build(silence_s=3.0)
        loss = pipe.step(INPUTS, TARGETS).loss
        if rank == 1:
            time.sleep(5.0)
            pipe.world._board.await_spreading()
            assert pipe.world._board._report is None
        return loss > 0

    assert processes(2, body, tmp_path) == [True, True]


def test_a_rank_that_hangs_before_its_pipeline_is_named_by_who_waits(processes, tmp_path, until):
    """All were said to be alive, the one that held them up like those that waited for it."""

    def body(rank):
        world = start_world(timeout_s=4.0)
        if rank == 0:
            until((tmp_path / "done").exists, 40, "the other has given up")
            return "late"
        with pytest.raises(PeerError) as caught:
            build(world=world)
        (tmp_path / "done").touch()
        return str(caught.value)

    late, told = processes(2, body, tmp_path)
    assert late == "late"
    assert "rank 0" in told and "no progress" in told and "joining the other ranks" in told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_within_torch_is_a_wait_for_others(processes, tmp_path, until, rank):
    """As in checkpoints, whose collectives are torch's own."""

    def body(own):
        seen = []
        if own == rank:
            pulse = ActivityTracker(600.0, None)
            pulse.note(Phase("saving"))
            thread = threading.Thread(target=lambda: seen.append(watch(pulse)))
            assert not pulse.waits
            thread.start()
            dist.all_gather_object([None, None], own)
            thread.join()
        else:
            threading.Event().wait(1.0)
            dist.all_gather_object([None, None], own)
        return seen

    def watch(pulse):
        until(lambda: pulse.waits, 20, "the other thread waits")
        return True

    assert processes(2, body, tmp_path)[rank] == [True]


class Elsewhere(HostDevice):
    """Stands for an accelerator."""

    is_accelerator = True


def test_a_rank_that_waits_for_nobody_learns_of_a_failure_as_its_step_ends(processes, tmp_path):
    """It went on to its optimizer with what an abort may have left in its gradients."""

    def body(rank):
        world = start_world(timeout_s=30.0)
        world.device = Elsewhere()
        if rank == 1:
            with pytest.raises(ValueError, match="broken"), collective_errors(world, "step 7"):
                raise ValueError("broken on purpose")
            return "told"
        with pytest.raises(PeerError) as caught, collective_errors(world, "step 7"):
            for _ in range(200):  # computes
                time.sleep(0.02)
        return str(caught.value)

    heard, told = processes(2, body, tmp_path)
    named = f"rank 1 on {socket.gethostname()}: step 7: ValueError: broken on purpose"
    assert (heard, told) == (named, "told"), "the host is where to look"
