"""Layers with which prices are measured: they take time, and change no number."""

import subprocess
import sys
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.device import HostDevice
from gpipe_hpc.training import pricing

current_rank: ContextVar[int] = ContextVar("current_rank")


@pytest.mark.parametrize("num_read", [0, 1000])
def test_a_layer_that_reads_does_what_a_linear_one_does(num_read):
    layer, plain = pricing._Reading(4, num_read), nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    given = torch.randn(2, 4, requires_grad=True)
    alike = given.detach().clone().requires_grad_()
    layer(given).square().sum().backward()
    plain(alike).square().sum().backward()
    assert torch.equal(layer(given), plain(alike))
    assert torch.equal(given.grad, alike.grad)
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_what_is_read_is_nothing_that_ranks_sum_send_or_save():
    layer = pricing._Reading(4, 1000)
    assert sum(each.numel() for each in layer.state_dict().values()) == 20


def test_forward_and_backward_read(monkeypatch):
    summed = []
    layer = pricing._Reading(4, 1000)
    whole = torch.Tensor.sum

    def sum_of(self, *args, **keywords):
        summed.append(self.numel())
        return whole(self, *args, **keywords)

    monkeypatch.setattr(torch.Tensor, "sum", sum_of)
    output = layer(torch.ones(2, 4))
    assert summed == [1000]
    output.backward(torch.ones_like(output))
    assert summed == [1000, 1000]


@pytest.mark.parametrize("slowed", [1.0, 2.0])
def test_layers_are_taken_off_what_an_action_takes_on_a_core_of_its_own(monkeypatch, slowed):
    """Of crowded ranks more was taken off: what a layer takes without waiting, twice or more."""
    stages, begin_s, each_s, layer_s = 2, 0.5, 0.06, 0.02
    bench = pricing._Bench(
        None, SimpleNamespace(device=HostDevice()), SimpleNamespace(stages=stages), slowed
    )
    # As many slots as micro-batches, and one to fill; all of it so much slower.

    def steps(self, layers, number):
        return slowed * (begin_s + (number + stages - 1) * each_s)

    monkeypatch.setattr(pricing._Bench, "_step_s", steps)
    cost = SimpleNamespace(total_s=layer_s)
    monkeypatch.setattr(pricing, "measure_layers", lambda *_, **__: [cost])
    action_s, step_s = bench.overheads()
    assert action_s == pytest.approx((each_s - layer_s) / 2)
    assert step_s == pytest.approx(begin_s)


@pytest.mark.parametrize("to", ["tensorboard", ""])
def test_what_a_run_loads_is_there_before_memory_is_measured(to):
    """A process was planned 13 MB too small: the preflight needs neither of them."""
    code = f"""
import sys
from gpipe_hpc.config import compose_config
from gpipe_hpc.training import pricing
pricing.load_as_a_run(compose_config(["metrics.to=[{to}]"]))
print("gpipe_hpc.training.loop" in sys.modules, "torch.utils.tensorboard" in sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", str(bool(to))]


@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (2, 2), (2, 1)])
def test_sums_are_timed_among_the_ranks_of_a_host(monkeypatch, ranks, hosts):
    """Over two hosts they went at the pace of the network, and were used as those of one."""
    formed = []

    def body(world):
        found = pricing._Bench(None, world, SimpleNamespace(stages=ranks), 1.0)
        monkeypatch.setattr(
            pricing, "kernel_identity", lambda: f"host {int(current_rank.get()) * hosts // ranks}"
        )
        current_rank.set(world.rank)
        groups = found._ranks_of_hosts()
        if world.rank == 0:
            formed.append(groups)
        return found.summing()

    run_on_threads(ranks, body)
    each = ranks // hosts
    assert formed == [[list(range(h * each, (h + 1) * each)) for h in range(hosts)]]
