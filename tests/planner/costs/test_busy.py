"""What other work on the machine does to measured layers: with a clock of its own."""

import logging
import random
from bisect import bisect
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc.models import LayerSpec, stage_layers
from gpipe_hpc.planner import measure_layers, minimax
from gpipe_hpc.planner.costs.clock import WorkClock


class Machine(WorkClock):
    """A machine whose time passes while layers say so, more slowly for them while it is busy."""

    def __init__(self, slowdown: Callable[[float], float]) -> None:
        self.slowdown, self.time_s = slowdown, 0.0

    def now(self) -> float:
        return self.time_s

    def timed(self, work, device):
        begin = self.time_s
        result = work()
        return result, self.time_s - begin

    def spend(self, seconds: float) -> None:
        self.time_s += seconds * self.slowdown(self.time_s)


class _Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, machine: Machine, seconds: float) -> Tensor:
        ctx.spent = machine, seconds
        machine.spend(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        machine, seconds = ctx.spent
        machine.spend(2 * seconds)
        return gradient, None, None


class Working(nn.Module):
    """Takes so many seconds forward, and twice as many backward."""

    def __init__(self, machine: Machine, seconds: float) -> None:
        super().__init__()
        self.machine, self.seconds = machine, seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Spend.apply(x, self.machine, self.seconds)


SECONDS = (0.05, 0.01, 0.03, 0.035, 0.01, 0.02, 0.02, 0.04, 0.01, 0.01, 0.02, 0.07)


def measured(machine: Machine, **settings) -> list[float]:
    layers = [LayerSpec(Working, machine, seconds) for seconds in SECONDS]
    example = torch.ones(2, requires_grad=True)
    return [cost.total_s for cost in measure_layers(layers, example, clock=machine, **settings)]


def slowest(counts: list[int]) -> float:
    return max(sum(SECONDS[index] for index in span) for span in stage_layers(counts))


def bursts(seed: int, mean_s: float) -> Callable[[float], float]:
    """Return a load that comes and goes: half of the time layers take three times as long."""
    draws = random.Random(seed)
    ends = list(accumulate(draws.expovariate(1 / mean_s) for _ in range(10_000)))
    return lambda now: 3.0 if bisect(ends, now) % 2 else 1.0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mean_s", [0.5, 2.0, 5.0])
def test_bursts_of_other_work_do_not_move_the_cut(seed, mean_s, caplog):
    """A machine that was busy now and then made 3|9 of 4|8: medians of one time for each layer."""
    costs = measured(Machine(bursts(seed, mean_s)), budget_s=90.0)
    assert costs == pytest.approx([3 * seconds for seconds in SECONDS], rel=0.06)
    for num_stages in (2, 3, 4):
        assert slowest(minimax(costs, num_stages)) <= 1.01 * slowest(minimax(SECONDS, num_stages))
    assert not caplog.records


@pytest.mark.parametrize("seed", range(5))
def test_costs_are_usual_times_where_a_machine_is_never_steady(seed):
    """Steps were planned 13 to 20 % too short: a sum of least times, and steps take usual ones."""
    draws = random.Random(seed)
    costs = measured(Machine(lambda now: draws.uniform(1, 1.4)))
    assert sum(costs) == pytest.approx(1.2 * 3 * sum(SECONDS), rel=0.06)
    # Beside each other, layers cost what the least of their times say.
    assert slowest(minimax(costs, 3)) <= 1.1 * slowest(minimax(SECONDS, 3))


def test_a_quiet_machine_needs_no_more_than_three_rounds():
    machine = Machine(lambda now: 1.0)
    measured(machine)
    # In each round the whole backward, its halves, and a forward alone, once to warm up and twice.
    units = 3 * (3 + 3 + 1) * (1 + 2)
    kept = 1  # a forward that counts what it keeps
    assert machine.time_s == pytest.approx(sum(set(SECONDS)) * (units + kept))


def test_what_stays_uncertain_is_told_when_the_time_is_spent(caplog):
    draws = random.Random(0)
    machine = Machine(lambda now: 1 + now * draws.uniform(1, 2))  # slower and slower
    with caplog.at_level(logging.WARNING, "gpipe_hpc.pipeline"):
        measured(machine, budget_s=50.0)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("partition: the times of layers 0, 1, 2, 3")
    assert "busy" in text and "set pipeline.partition" in text


def test_all_layers_are_measured_before_any_is_measured_again(monkeypatch):
    built: list[float] = []
    make = Working.__init__

    def noting(self, machine: Machine, seconds: float) -> None:
        built.append(seconds)
        make(self, machine, seconds)

    monkeypatch.setattr(Working, "__init__", noting)
    measured(Machine(lambda now: 1.0))
    once = list(dict.fromkeys(SECONDS))
    assert built == [*once, *once, *once]
