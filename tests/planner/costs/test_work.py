"""What operators do is told by kind, and priced by the rate of its kind."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.costs.rates import Rates, host_copy_rate, measured_rates
from gpipe_hpc.planner.costs.work import OperationWork, PassWork, WorkCounter
from tests.simulated.single import single_device


class Ticking:
    """A clock in which each piece of work takes a millisecond less than the one before."""

    def __init__(self):
        self.num_timed = 0

    def now(self):
        return 0.0

    def timed(self, work, device):
        self.num_timed += 1
        return work(), 1.0 - self.num_timed / 1000


def work_of(call):
    with WorkCounter() as counter:
        call()
    return counter.so_far()


def meta(*shape):
    return torch.empty(shape, device="meta")


def test_each_kind_is_counted_apart():
    rows, matrix = meta(3, 8), meta(5, 8)
    assert work_of(lambda: F.linear(rows, matrix)) == OperationWork(products=2 * 3 * 8 * 5)
    images, kernels = meta(2, 3, 6, 6), meta(4, 3, 3, 3)
    assert work_of(lambda: F.conv2d(images, kernels, padding=1)) == OperationWork(
        convolutions=2 * 2 * 4 * 36 * 27
    )
    query = torch.ones(1, 2, 4, 8)
    seen = work_of(lambda: F.scaled_dot_product_attention(query, query, query))
    assert seen.attention == 2 * 2 * 4 * 4 * (8 + 8)
    assert seen.products == seen.convolutions == 0


def test_what_has_no_flops_is_told_by_the_bytes_it_moves():
    numbers, table = meta(10), meta(1000, 4)
    assert work_of(lambda: numbers + 1) == OperationWork(moved_bytes=2 * 40)
    assert work_of(lambda: numbers + numbers) == OperationWork(moved_bytes=2 * 40)
    assert work_of(lambda: numbers.view(2, 5).t()) == OperationWork(), "views move nothing"
    rows = torch.zeros(6, dtype=torch.int64, device="meta")
    # As much as is written: of a table few rows are read.
    assert work_of(lambda: F.embedding(rows, table)).moved_bytes == 2 * 6 * 4 * 4


def test_layers_tell_the_work_of_each_pass():
    layers = [nn.Linear(8, 16), nn.Conv1d(4, 4, 1)]
    first, second = count_model(layers, torch.ones(4, 8)).layers
    assert first.work.backward.products == first.backward_flops == 2 * 4 * 8 * 16
    assert first.work.of_weight.products == 2 * 4 * 8 * 16 and not first.input_flops
    assert second.work.forward.convolutions == second.forward_flops == 2 * 16 * 4 * 4
    both = PassWork.together([first.work, second.work])
    assert both.forward.flops == first.forward_flops + second.forward_flops
    _, act = count_model([nn.Linear(8, 8), nn.GELU()], torch.ones(4, 8)).layers
    # Reads what comes, writes what goes; back, the gradient and what was kept.
    assert act.work.forward == OperationWork(moved_bytes=2 * 128)
    assert act.work.of_input == OperationWork(moved_bytes=3 * 128)


def test_seconds_follow_the_rate_of_each_kind():
    work = OperationWork(products=10, convolutions=20, attention=30, moved_bytes=40)
    assert Rates(10, 20, 30, 40).seconds(work) == 4.0
    assert Rates.alike(10).seconds(work) == 6.0, "what has no FLOPs takes no time"
    assert Rates.alike(10, 80).seconds(work) == 6.5
    told = Rates(1e9, 2e9, 3e9, 4e9).text()
    assert "1.00 GFLOP/s a rank in matrix products, 2.00 GFLOP/s in conv" in told
    assert told.endswith("4.00 GB/s read and written by other operations")
    assert Rates.alike(1e9).text() == "1.00 GFLOP/s a rank"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rates_are_those_of_the_median_time_without_the_first(precision):
    clock = Ticking()
    rates = measured_rates(HostDevice(), precision, clock)
    forward = 2 * 256 * 256 * 4 * 256
    assert rates.products == pytest.approx(3 * forward / 0.9965)
    assert clock.num_timed == 4 * 5, "each kind as often"
    assert rates.convolutions > 0 and rates.attention > 0 and rates.moved_bytes > 0


def test_copies_to_the_host_are_timed_on_an_accelerator_alone():
    assert host_copy_rate(HostDevice()) is None
    with single_device() as device:
        assert host_copy_rate(device, Ticking()) == pytest.approx(2**26 / 0.9965)
    assert not device.tracker.faults
