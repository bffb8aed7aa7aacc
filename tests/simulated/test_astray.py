"""What lies on another accelerator than a rank's is found and named, wherever it comes from."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.device.device import Accelerator, HostDevice
from gpipe_hpc.errors import GpipeError
from tests.simulated.interpose import OTHER
from tests.simulated.scenarios import WIDTH, Block, square_sum
from tests.simulated.world import run_simulated


class Elsewhere(nn.Module):
    """A layer that leaves its output on another device."""

    def forward(self, x):
        return {"own": x, "astray": x.to(OTHER)}


def astray_loss(output, target):
    total, weight = square_sum(output, target)
    return total.to(OTHER), weight


def refused(layers=None, loss=square_sum, inputs=OTHER, targets="cpu"):
    """Return what the ranks of a pipeline say whose tensors lie there."""

    def body(world):
        own = layers or [LayerSpec(Block) for _ in range(4)]
        pipe = Pipeline(own, loss, world=world, microbatches=2, partition="uniform")
        batch = torch.ones(4, WIDTH).to(inputs), torch.ones(4, WIDTH).to(targets)
        with pytest.raises(GpipeError) as caught:
            pipe.step(*batch)
        return str(caught.value)

    return run_simulated(2, body).results


def test_a_batch_on_another_device_is_named():
    """Before, it was copied by way of the host without a word, and each step waited for that."""
    text, _ = refused()
    assert (
        "DataError: batch: expected tensors on cpu:0, the device of this rank, or on the host"
        in text
    )
    assert f"got one of shape (2, {WIDTH}) on cpu:1; leave the batch on the host" in text


def test_targets_on_another_device_are_named():
    _, text = refused(inputs="cpu", targets=OTHER)
    assert "DataError: batch: " in text and "on cpu:1; leave the batch on the host" in text


def test_an_output_on_another_device_is_named_with_its_stage():
    """Before, it was sent as if it were of the host, and the receiver waited for something else."""
    layers = [LayerSpec(Block), LayerSpec(Elsewhere), LayerSpec(Block), LayerSpec(Block)]
    text, _ = refused(layers, inputs="cpu")
    assert (
        "ModelError: stage 0 (layers 0 to 1): expected tensors on cpu:0" in text
        and "on cpu:1" in text
    )


def test_a_loss_on_another_device_is_named():
    _, text = refused(loss=astray_loss, inputs="cpu")
    assert "ModelError: loss_fn (astray_loss): expected tensors on cpu:0" in text


class Told:
    """As much of a tensor as says where it lies."""

    def __init__(self, device):
        self.device = torch.device(device)


@pytest.mark.parametrize(
    ("at", "holds", "is_astray"),
    [
        ("cuda:0", True, False),
        ("cuda:1", False, True),
        ("xpu:0", False, True),
        ("cpu", False, False),
        ("meta", False, False),
    ],
)
def test_a_device_holds_what_has_its_number(at, holds, is_astray):
    """Before, all of a kind was held: cuda:1 by the rank of cuda:0."""
    device = Accelerator(torch.device("cuda", 0))
    assert (device.holds(Told(at)), device.is_astray(Told(at))) == (holds, is_astray)
    assert HostDevice().is_astray(Told(at)) is (at not in ("cpu", "meta"))
