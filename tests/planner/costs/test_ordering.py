"""Layers on an accelerator whose host orders their work faster or more slowly than it is done."""

import pytest
import torch
from torch import nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner import measure_layers
from gpipe_hpc.planner.costs.clock import WorkClock

NUMBER = 4


class Played(HostDevice):
    """A device of its own, whose times the clock tells."""

    is_accelerator = True


class Told(WorkClock):
    """Every part takes the device and the host so long alone; a pass over all layers `through_s`.

    That is of a forward with its backward; a bare forward takes half as long.
    """

    def __init__(self, device_s, host_s, through_s):
        self.device_s, self.host_s, self.now_s = device_s, host_s, 0.0
        self.through_s = through_s

    def now(self):
        return self.now_s

    def ordered(self, work, device):
        self.now_s += self.device_s
        return work(), self.device_s, self.host_s

    def from_idle(self, work, device):
        self.now_s += self.through_s
        result = work()
        return result, self.through_s if result is None else self.through_s / 2


def cost(device_s, host_s, through_s, layers=None):
    layers = layers or [LayerSpec(nn.Linear, 4, 4) for _ in range(NUMBER)]
    clock = Told(device_s, host_s, through_s)
    example = torch.ones(2, 4, requires_grad=True)
    return measure_layers(layers, example, clock=clock, device=Played())[-1]


def seconds(found):
    return found.forward_s, found.backward_s, found.bare_forward_s


def test_where_the_device_takes_longer_the_host_does_not_count():
    """As of GPT-2 medium on an H200: the host took 2.1 times as long with each layer alone."""
    found = cost(device_s=1e-3, host_s=2e-3, through_s=2 * NUMBER * 1e-3)
    assert seconds(found) == (1e-3, 1e-3, 1e-3)


def test_where_a_step_waits_for_the_host_layers_take_what_they_took_together():
    found = cost(device_s=1e-3, host_s=10e-3, through_s=2 * NUMBER * 4e-3)
    assert seconds(found) == pytest.approx((4e-3, 4e-3, 4e-3))


def test_a_device_that_is_a_little_late_does_not_count_as_waiting():
    """It begins with nothing in hand: that costs something once, however many layers follow."""
    found = cost(device_s=1e-3, host_s=2e-3, through_s=2 * NUMBER * 1.04e-3)
    assert seconds(found) == (1e-3, 1e-3, 1e-3)


def test_of_layers_that_fail_together_half_the_time_of_the_host_counts():
    """Each ReLU alone changes a copy; together the second changes what the first one keeps."""
    layers = [LayerSpec(nn.ReLU, inplace=True) for _ in range(3)]
    found = cost(device_s=1e-3, host_s=10e-3, through_s=1.0, layers=layers)
    assert seconds(found) == (5e-3, 5e-3, 5e-3)


def test_one_layer_waits_for_the_host_as_several_do():
    layers = [LayerSpec(nn.Linear, 4, 4)]
    found = cost(device_s=1e-3, host_s=10e-3, through_s=2 * 4e-3, layers=layers)
    assert seconds(found) == pytest.approx((4e-3, 4e-3, 4e-3))


def test_layers_that_take_long_are_not_run_together_and_half_the_time_of_the_host_counts():
    found = cost(device_s=40e-3, host_s=100e-3, through_s=1.0)
    assert seconds(found) == (50e-3, 50e-3, 50e-3)
