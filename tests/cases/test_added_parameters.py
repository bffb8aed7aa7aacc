"""Parameters that come, go or are exchanged between steps: an adapter, a head that is made late.

The gradient of one that was added was not cleared, divided, summed over replicas or saved.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.cases.state_support import (
    WIDTH,
    assert_refused,
    by_ranks,
    linear,
)
from tests.support import batches, mean_square

DATA = batches(4)
LAYOUTS = {
    "two stages": (2, {"stages": 2, "microbatches": 4}),
    "replicas": (2, {"stages": 1, "replicas": 2, "microbatches": 2}),
    "one rank": (1, {"stages": 1, "microbatches": 4}),
    "interleaved": (
        2,
        {
            "stages": 2,
            "microbatches": 4,
            "schedule": "interleaved",
            "schedule_options": {"stages_per_rank": 2},
        },
    ),
    "chimera": (2, {"stages": 2, "microbatches": 4, "schedule": "chimera"}),
}


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = linear(), None

    def forward(self, x):
        y = torch.tanh(self.inner(x))
        return y if self.scale is None else y + x * self.scale


class MakesItLate(Adapted):
    """Makes its parameter in its first forward, as lazy layers do."""

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        return super().forward(x)


def adapted():
    return [Adapted() for _ in range(4)]


def layers_of(pipe):
    return [layer for stage in pipe.stages.values() for layer in stage.layers.values()]


def add_parameter(layer):
    layer.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))


def add_frozen_parameter(layer):
    add_parameter(layer)
    layer.scale.requires_grad_(False)


def add_module(layer):
    layer.inner = nn.Sequential(layer.inner, linear())


def replace_parameter(layer):
    layer.inner.weight = nn.Parameter(layer.inner.weight.detach().clone())


def replace_module(layer):
    layer.inner = linear()


ADDED = {
    add_parameter: "scale",
    add_frozen_parameter: "scale",
    add_module: "inner.1.weight",
    replace_parameter: "inner.weight",
    replace_module: "inner.weight",
}


def at_step(number, change, only=None):
    def before_step(pipe, optimizer, step):
        if step == number:
            layers = layers_of(pipe)
            for layer in layers if only is None else layers[only : only + 1]:
                change(layer)

    return before_step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", ADDED, ids=lambda change: change.__name__)
def test_parameter_that_is_added_is_refused_in_the_next_step(change, layout):
    num_ranks, keywords = LAYOUTS[layout]
    ranks = by_ranks(adapted, DATA, num_ranks, before_step=at_step(2, change), **keywords)
    assert_refused(
        ranks, f".{ADDED[change]}: the parameter was", "after Pipeline was created", steps=2
    )


def test_parameter_that_is_added_before_the_first_step_is_refused():
    before = at_step(0, add_parameter)
    ranks = by_ranks(adapted, DATA, 2, before_step=before, stages=2, microbatches=4)
    assert_refused(ranks, "scale: the parameter was added after Pipeline")


def test_parameter_that_one_rank_adds_stops_all():
    def before_step(pipe, optimizer, step):
        if step == 2 and pipe.world.rank == 1:
            add_parameter(layers_of(pipe)[0])

    ranks = by_ranks(adapted, DATA, 2, before_step=before_step, stages=2, microbatches=4)
    assert_refused(ranks, "layers.2.scale", "was added", steps=2)


def test_parameter_that_the_first_forward_makes_is_refused_in_that_step():
    def make():
        return [MakesItLate() for _ in range(4)]

    ranks = by_ranks(make, DATA, 2, stages=2, microbatches=4)
    assert_refused(ranks, "scale: the parameter was added after Pipeline")


class Branched(nn.Module):
    """Has a branch that can be taken away, and an activation that can be exchanged."""

    def __init__(self):
        super().__init__()
        self.inner, self.branch, self.act = linear(), linear(), nn.Tanh()

    def forward(self, x):
        y = self.act(self.inner(x))
        return y if self.branch is None else y + self.branch(x)


def branched():
    return [Branched() for _ in range(4)]


def exchange_activation(layer):
    layer.act = nn.Softplus()


def take_branch_away(layer):
    layer.branch = None


def prune_it(layer):
    prune.l1_unstructured(layer.inner, "weight", 0.25)


def parametrize_it(layer):
    parametrize.register_parametrization(layer.inner, "weight", nn.Softshrink(0.01))


def freeze(layer):
    layer.inner.requires_grad_(False)


def copy_values(layer):
    layer.inner.weight.data = layer.inner.weight.detach() * 0.5


def add_buffer(layer):
    layer.register_buffer("late", torch.ones(1, dtype=torch.float64))


def plain_with(change, number):
    """Train by a plain loop whose layers are changed ahead of one of its steps."""
    torch.manual_seed(0)
    layers = branched()
    model = nn.Sequential(*layers)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step, (inputs, targets) in enumerate(DATA):
        if step == number:
            for layer in layers:
                change(layer)
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            loss = mean_square(model(x), y) * len(x) / len(inputs)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    return losses, {f"layers.{n}": p.detach() for n, p in parameters.items()}


HARMLESS = (
    exchange_activation,
    take_branch_away,
    prune_it,
    parametrize_it,
    freeze,
    copy_values,
    add_buffer,
)


@pytest.mark.parametrize("layout", ["two stages", "replicas"])
@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
def test_changes_that_add_no_parameter_train_right(change, layout):
    num_ranks, keywords = LAYOUTS[layout]
    losses, weights = plain_with(change, 2)
    ranks = by_ranks(branched, DATA, num_ranks, before_step=at_step(2, change), **keywords)
    for rank in ranks:
        assert rank.error is None, rank.error
        torch.testing.assert_close(rank.trained.losses, losses, rtol=1e-10, atol=1e-10)
        for name in rank.trained.weights.keys() & weights.keys():
            torch.testing.assert_close(rank.trained.weights[name], weights[name])


class Counts(nn.Module):
    """Has a buffer that its forward changes, and no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return x - self.mean


def test_buffers_of_a_module_that_is_added_change_once_a_micro_batch():
    # Its recomputation changed them again, as nobody had looked for them there.
    def put(layer):
        layer.act = Counts()

    losses, _ = plain_with(put, 2)
    ranks = by_ranks(branched, DATA, 2, before_step=at_step(2, put), stages=2, microbatches=4)
    assert [rank.error for rank in ranks] == [None, None]
    torch.testing.assert_close(ranks[0].trained.losses, losses, rtol=1e-10, atol=1e-10)
