"""One module in two layers, with a buffer that forwards change: right on one stage alone.

On two stages each had a copy, and the training changed with the cut. BatchNorm was refused already.
"""

import copy

import pytest
import torch
from torch import nn

from tests.cases.state_support import (
    WIDTH,
    assert_as_plain,
    assert_refused,
    by_a_plain_loop,
    by_ranks,
    linear,
)
from tests.support import batches

DATA = batches(3)


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def move(self, x):
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)

    def forward(self, x):
        with torch.no_grad():
            self.move(x)
        return x * self.scale - self.mean


class Assigned(Average):
    def move(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)


class ThroughData(Average):
    def move(self, x):
        self.mean.data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)


class Reader(nn.Module):
    """Subtracts what another layer has averaged: it has the same tensor as a buffer."""

    def __init__(self, average):
        super().__init__()
        self.register_buffer("seen", average.mean)

    def forward(self, x):
        return x - self.seen


class Frozen(nn.Module):
    """A table that two layers share and that stays as it is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(WIDTH, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale + self.table


def twice(shared):
    return [shared, linear(), linear(), shared]


def in_a_container():
    shared = Average()
    return [nn.Sequential(linear(), shared), linear(), linear(), nn.ModuleList([shared])[0]]


def reading():
    average = Average()
    return [average, linear(), linear(), Reader(average)]


def spectral():
    return twice(nn.utils.parametrizations.spectral_norm(linear()))


MOVING = {
    "average": lambda: twice(Average()),
    "assigned": lambda: twice(Assigned()),
    "data": lambda: twice(ThroughData()),
    "spectral norm": spectral,
    "container": in_a_container,
    "reader": reading,
}


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.parametrize("name", MOVING)
def test_buffer_that_moves_on_one_stage_of_two_is_refused(name, recompute):
    layout = {"stages": 2, "microbatches": 4, "recompute": recompute}
    ranks = by_ranks(MOVING[name], DATA, 2, **layout)
    assert_refused(ranks, "layers.0", "layers.3", "buffer", "is changed in a forward")


@pytest.mark.parametrize("schedule", ["interleaved", "chimera", "zb_v"])
def test_stages_of_one_rank_are_other_stages_too(schedule):
    options = {"stages_per_rank": 2} if schedule == "interleaved" else {}
    num_ranks = 2
    ranks = by_ranks(
        lambda: twice(Average()),
        DATA,
        num_ranks,
        stages=2,
        microbatches=4,
        schedule=schedule,
        schedule_options=options,
    )
    assert_refused(ranks, "layers.3", "is changed in a forward")


@pytest.mark.parametrize("name", MOVING)
def test_on_one_stage_both_uses_see_one_buffer(name):
    ranks = by_ranks(MOVING[name], DATA, 1, stages=1, microbatches=4)
    assert_as_plain(ranks, by_a_plain_loop(MOVING[name], DATA))


def test_shared_buffer_that_stays_may_be_anywhere():
    def make():
        return twice(Frozen())

    ranks = by_ranks(make, DATA, 2, stages=2, microbatches=4)
    assert_as_plain(ranks, by_a_plain_loop(make, DATA))


def test_buffers_of_their_own_may_move_anywhere():
    def make():
        return [Average(), linear(), linear(), Average()]

    ranks = by_ranks(make, DATA, 2, stages=2, microbatches=4)
    assert_as_plain(ranks, by_a_plain_loop(make, DATA))


def test_a_deep_copy_is_a_module_of_its_own():
    def make():
        average = Average()
        return [average, linear(), linear(), copy.deepcopy(average)]

    ranks = by_ranks(make, DATA, 2, stages=2, microbatches=4)
    assert_as_plain(ranks, by_a_plain_loop(make, DATA))
