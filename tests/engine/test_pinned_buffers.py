"""Pinned memory of what waits on the host: made once, and written again in the order of copies."""

import gc

import pytest
import torch

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.engine.offload import HostCopy, PinnedBufferPool
from gpipe_hpc.errors import ActionError
from tests.simulated.single import single_device
from tests.simulated.world import run_simulated
from tests.support import batch, gradients_of, linears, square_sum


def train(world, takes=None):
    pipe = Pipeline(
        linears(6), square_sum, microbatches=6, seed=1, offload=True, recompute="never", world=world
    )
    found = []
    for size in (24, 24, 24, 12):
        if takes is not None:
            takes.append([])
        found.append(pipe.step(*batch(size)).loss)
    device = world.device
    return found, {name: device.to_host(each) for name, each in gradients_of(pipe).items()}


def test_memory_is_pinned_in_the_first_step_alone(monkeypatch):
    """Each tensor of each micro-batch pinned memory of its own."""
    takes, ends = [], []
    take, end = PinnedBufferPool.take, PinnedBufferPool.end

    def noted(room, num_bytes):
        buffer = take(room, num_bytes)
        takes[-1].append((num_bytes, buffer.data_ptr()))
        return buffer

    def ended(room):
        ends.append(len(takes))
        end(room)

    monkeypatch.setattr(PinnedBufferPool, "take", noted)
    monkeypatch.setattr(PinnedBufferPool, "end", ended)
    (played,) = run_simulated(1, lambda world: train(world, takes)).results
    assert ends == [1, 2, 3, 4], "once for each step"
    first, *others = takes
    assert first
    for step in others[:2]:
        assert sorted(step) and {at for _, at in step} <= {at for _, at in first}
    monkeypatch.undo()
    (on_cpu,) = run_on_threads(1, train)
    assert played[0] == on_cpu[0]
    assert all(torch.equal(each, on_cpu[1][name]) for name, each in played[1].items())


def failing_amid_copies(world):
    """Return what is allocated behind a step, and behind one that fails while copies are out."""

    def loss(output, target):
        if fails and len(seen) == 4:
            raise ValueError("planted")
        seen.append(1)
        return square_sum(output, target)

    settings = {"microbatches": 6, "schedule": "gpipe", "offload": True, "recompute": "never"}
    pipe = Pipeline(linears(6), loss, seed=1, world=world, **settings)
    taken, losses = [], []
    for fails in (False, True, False):
        seen = []
        if fails:
            with pytest.raises(ActionError, match="planted"):
                pipe.step(*batch(24))
        else:
            losses.append(pipe.step(*batch(24)).loss)
        for parameter in pipe.parameters():
            parameter.grad = None
        gc.collect()
        taken.append(world.device.memory_allocated())
    return taken, losses


def test_a_step_that_fails_lets_go_of_what_was_on_its_way_out():
    (((good, failed, again), losses),) = run_simulated(1, failing_amid_copies).results
    assert failed <= good and again == good
    assert losses[0] == losses[1]


def test_sizes_that_a_step_does_not_use_are_let_go_of():
    with single_device() as device:
        room = PinnedBufferPool(device)
        room.end_fetch([room.take(8)])
        room.end()
        kept = room.take(8)
        room.end_fetch([kept])
        room.end_fetch([room.take(16)])
        room.end()
        assert room.take(8).data_ptr() == kept.data_ptr()
        room.end()
        room.end()
        assert not any(room._unused.values()) and not any(room._free.values())


def test_copies_out_wait_for_the_fetch_that_reads_the_buffer_and_for_no_earlier_one_again():
    with single_device() as device:
        room = PinnedBufferPool(device)
        buffers = [device.pinned((8,), torch.uint8) for _ in range(3)]
        room.end_fetch(buffers[:1])
        room.end_fetch(buffers[1:])
        waited = []
        room.out.wait_event = waited.append
        assert all(room.take(8) is buffer for buffer in buffers)
        assert len(waited) == 2 and len(set(map(id, waited))) == 2
        assert not room._ends


def test_marks_of_buffers_that_are_gone_go_with_them():
    """Where each step had other sizes, a mark was kept of every fetch of the run."""
    with single_device() as device:
        room = PinnedBufferPool(device)
        for step in range(1, 20):
            room.end_fetch([room.take(8 * step)])
            room.end_fetch([room.take(8 * step + 4)])
            room.end()
            assert len(room._ends) == 2
        waited = []
        room.out.wait_event = waited.append
        assert room.take(8 * step) is not None and len(waited) == 1


def test_a_tensor_of_the_host_stays_there():
    """It came back as one of the device."""
    with single_device() as device:
        copy = HostCopy([], device, PinnedBufferPool(device))
        weight = device.to_device(torch.ones(4)).requires_grad_()
        shape = torch.tensor(2.0)
        with copy.collecting():
            made = weight * weight * shape
        copy.offload()
        copy.fetch()
        copy.wait()
        made.sum().backward()
        assert torch.equal(device.to_host(weight.grad), torch.full((4,), 4.0))
        assert not device.holds(shape) and not device.tracker.faults
