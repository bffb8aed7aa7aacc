"""Transfer of the caller's batch to a device."""

import pytest
import torch

from gpipe_hpc import Pipeline
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.inputs import Intake
from tests.simulated.single import single_device
from tests.simulated.world import between, run_simulated
from tests.support import batch, gradients_of, linears, square_sum

NESTS = {
    "a tensor": torch.arange(6.0).view(2, 3),
    "a nest": {"ids": torch.arange(4), "rest": (torch.ones(2, 2, dtype=torch.bool), "word", None)},
    "a scalar": torch.tensor(3.5),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a view with holes": torch.arange(20.0).view(4, 5)[:, ::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "nothing": torch.ones(0, 3),
}


def tensors_of(nest):
    if isinstance(nest, torch.Tensor):
        return [nest]
    parts = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_transferred_batch_equals_torch_and_host_does_not_wait(nest):
    """Regression: the host waited for the device for each input that was not pinned."""
    with single_device() as device:
        intake = Intake(device)
        transferred, waits = between(device, lambda: intake.to_device(nest))
        assert not waits
        for own, arrived in zip(tensors_of(nest), tensors_of(transferred), strict=True):
            moved = device.to_device(own)
            assert device.holds(arrived) and arrived.stride() == moved.stride()
            assert torch.equal(device.to_host(arrived * 1), own * 1)
        assert not device.tracker.faults


def test_tensor_on_the_device_is_not_copied():
    with single_device() as device:
        own = device.to_device(torch.ones(3)).requires_grad_()
        arrived = Intake(device).to_device((own,))[0]
        assert arrived.data_ptr() == own.data_ptr() and not arrived.requires_grad


def test_tensor_is_not_copied_on_a_cpu():
    own = torch.ones(3, requires_grad=True)
    arrived = Intake(HostDevice()).to_device(own)
    assert arrived.data_ptr() == own.data_ptr() and not arrived.requires_grad


def test_pinned_batch_may_be_overwritten_after_the_step():
    """Regression: pending copies read the data loader's next batch."""
    inputs, targets = batch(8)

    def body(world, place):
        pipe = Pipeline(linears(3), square_sum, microbatches=4, seed=1, world=world)
        given = [place(world.device, each) for each in (inputs, targets)]
        for _ in range(2):
            loss = pipe.step(*given)
            for each in given:
                each.add_(1.0)
        return loss.loss, {n: world.device.to_host(g) for n, g in gradients_of(pipe).items()}

    def pinned(device, tensor):
        own = device.pinned(tensor.shape, tensor.dtype)
        own.copy_(tensor)
        return own

    (found,) = run_simulated(1, lambda world: body(world, pinned)).results
    (expected,) = run_simulated(1, lambda world: body(world, lambda _, t: t.clone())).results
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], each) for name, each in expected[1].items())
