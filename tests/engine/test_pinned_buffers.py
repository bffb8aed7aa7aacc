"""Pinned host buffers of offloaded tensors: allocated once and reused in the order of copies."""

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


def test_pinned_memory_is_allocated_in_first_step_only(monkeypatch):
    """Regression: each tensor of each micro-batch allocated its own pinned memory."""
    takes, ends = [], []
    take, end = PinnedBufferPool.take, PinnedBufferPool.end

    def recording_take(pool, num_bytes):
        buffer = take(pool, num_bytes)
        takes[-1].append((num_bytes, buffer.data_ptr()))
        return buffer

    def recording_end(pool):
        ends.append(len(takes))
        end(pool)

    monkeypatch.setattr(PinnedBufferPool, "take", recording_take)
    monkeypatch.setattr(PinnedBufferPool, "end", recording_end)
    (simulated,) = run_simulated(1, lambda world: train(world, takes)).results
    assert ends == [1, 2, 3, 4], "expected one end per step"
    first, *others = takes
    assert first
    for step in others[:2]:
        assert sorted(step) and {at for _, at in step} <= {at for _, at in first}
    monkeypatch.undo()
    (on_cpu,) = run_on_threads(1, train)
    assert simulated[0] == on_cpu[0]
    assert all(torch.equal(each, on_cpu[1][name]) for name, each in simulated[1].items())


def train_with_failing_step(world):
    """Return the device memory after a good, a failed and a good step, and the losses.

    The failure occurs while activations are being copied to the host.
    """

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


def test_failed_step_releases_tensors_being_offloaded():
    (((good, failed, again), losses),) = run_simulated(1, train_with_failing_step).results
    assert failed <= good and again == good
    assert losses[0] == losses[1]


def test_buffer_sizes_not_used_by_a_step_are_released():
    with single_device() as device:
        pool = PinnedBufferPool(device)
        pool.end_fetch([pool.take(8)])
        pool.end()
        buffer = pool.take(8)
        pool.end_fetch([buffer])
        pool.end_fetch([pool.take(16)])
        pool.end()
        assert pool.take(8).data_ptr() == buffer.data_ptr()
        pool.end()
        pool.end()
        assert not any(pool._unused.values()) and not any(pool._free.values())


def test_offload_waits_once_for_each_fetch_from_its_buffer():
    with single_device() as device:
        pool = PinnedBufferPool(device)
        buffers = [device.pinned((8,), torch.uint8) for _ in range(3)]
        pool.end_fetch(buffers[:1])
        pool.end_fetch(buffers[1:])
        waited = []
        pool.out.wait_event = waited.append
        assert all(pool.take(8) is buffer for buffer in buffers)
        assert len(waited) == 2 and len(set(map(id, waited))) == 2
        assert not pool._ends


def test_events_of_released_buffers_are_released():
    """Regression: if every step had other sizes, the events of all fetches of the run were kept."""
    with single_device() as device:
        pool = PinnedBufferPool(device)
        for step in range(1, 20):
            pool.end_fetch([pool.take(8 * step)])
            pool.end_fetch([pool.take(8 * step + 4)])
            pool.end()
            assert len(pool._ends) == 2
        waited = []
        pool.out.wait_event = waited.append
        assert pool.take(8 * step) is not None and len(waited) == 1


def test_host_tensor_stays_on_host_after_fetch():
    """Regression: a host tensor was fetched as a device tensor."""
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
