"""Parameters that a forward writes into: refused where several ranks hold copies of them.

nn.Embedding(max_norm=...) renormalises rows in its forward. Replicas and mirrored copies of a stage
see other rows, and their weights drifted apart for good; nobody said so.
"""

import pytest
import torch
import torch.nn.functional as F
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

ROWS = 40


def tokens(num_steps=3, size=8):
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randint(0, ROWS, (size, 2), generator=generator),
            3 * torch.randn(size, WIDTH, generator=generator, dtype=torch.float64),
        )
        for _ in range(num_steps)
    ]


class Table(nn.Module):
    def __init__(self, max_norm=0.5):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, max_norm=max_norm, dtype=torch.float64)

    def forward(self, indices):
        return self.table(indices).sum(1)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, max_norm=0.5, dtype=torch.float64)

    def forward(self, indices):
        return self.table(indices)


class Writes(nn.Module):
    """Normalises its weight in its forward, in one of the ways that layers do it."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.way = linear(), way

    def forward(self, x):
        weight = self.inner.weight
        if self.way == "in place":
            with torch.no_grad():
                weight.clamp_(-0.2, 0.2)
        elif self.way == "data in place":
            weight.data.clamp_(-0.2, 0.2)
        elif self.way == "data":
            weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.3)
        return self.inner(x)


class Teacher(nn.Module):
    """Follows its student, a little with each micro-batch; a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.student = linear()
        self.teacher = linear().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                own.data = 0.9 * own.data + 0.1 * other.data
        return self.student(x) + 0.1 * self.teacher(x).detach()


def table_model():
    return [Table(), linear(), nn.Tanh(), linear()]


def bag_model():
    return [Bags(), linear(), nn.Tanh(), linear()]


COPIES = {
    "replicas": (2, {"stages": 1, "replicas": 2, "microbatches": 2}),
    "chimera": (2, {"stages": 2, "microbatches": 4, "schedule": "chimera"}),
    "dualpipe": (2, {"stages": 2, "microbatches": 4, "schedule": "dualpipe"}),
    "flat": (2, {"stages": 1, "replicas": 2, "microbatches": 2, "outer": {"shard": "flat"}}),
    "never": (2, {"stages": 1, "replicas": 2, "microbatches": 2, "recompute": "never"}),
    "both": (4, {"stages": 2, "replicas": 2, "microbatches": 2}),
}
ALONE = {
    "one rank": (1, {"stages": 1, "microbatches": 4}),
    "two stages": (2, {"stages": 2, "microbatches": 4}),
    "1f1b": (2, {"stages": 2, "microbatches": 4, "schedule": "1f1b"}),
    "zb_h1": (2, {"stages": 2, "microbatches": 4, "schedule": "zb_h1"}),
    "never": (2, {"stages": 2, "microbatches": 4, "recompute": "never"}),
}


@pytest.mark.parametrize("make", [table_model, bag_model])
@pytest.mark.parametrize("layout", COPIES)
def test_max_norm_is_refused_where_there_are_copies(make, layout):
    num_ranks, keywords = COPIES[layout]
    ranks = by_ranks(make, tokens(), num_ranks, **keywords)
    assert_refused(ranks, "layers.0.table.weight", "max_norm", "changed within a step")


@pytest.mark.parametrize("make", [table_model, bag_model])
@pytest.mark.parametrize("layout", ALONE)
def test_max_norm_trains_right_with_one_copy(make, layout):
    num_ranks, keywords = ALONE[layout]
    ranks = by_ranks(make, tokens(), num_ranks, rate=0.5, **keywords)
    assert_as_plain(ranks, by_a_plain_loop(make, tokens(), rate=0.5))


@pytest.mark.parametrize("layout", ALONE)
def test_rows_that_are_renormalised_again_to_rounding_are_no_harm(layout):
    # In float32 a row that was scaled to the norm may still be longer by the last bit.
    def make():
        table = nn.Embedding(256, 32, max_norm=0.5)
        return [table, nn.Flatten(), nn.Linear(128, WIDTH), nn.Linear(WIDTH, WIDTH)]

    rows = torch.arange(256).view(64, 4)
    data = [(rows, torch.ones(64, WIDTH)) for _ in range(3)]
    num_ranks, keywords = ALONE[layout]
    ranks = by_ranks(make, data, num_ranks, **keywords)
    plain = by_a_plain_loop(make, data)
    assert [rank.error for rank in ranks] == [None] * num_ranks
    torch.testing.assert_close(ranks[0].trained.losses, plain.losses, rtol=1e-5, atol=1e-5)


def test_table_without_max_norm_trains_right_with_copies():
    def make():
        return [Table(max_norm=None), linear(), nn.Tanh(), linear()]

    for num_ranks, keywords in COPIES.values():
        ranks = by_ranks(make, tokens(), num_ranks, **keywords)
        assert_as_plain(ranks, by_a_plain_loop(make, tokens()))


@pytest.mark.parametrize("way", ["in place", "data in place", "data"])
def test_any_forward_that_writes_into_a_weight_is_refused(way):
    def make():
        return [linear(), Writes(way), nn.Tanh(), linear()]

    ranks = by_ranks(make, batches(3), 2, stages=1, replicas=2, microbatches=2)
    assert_refused(ranks, "layers.1.inner.weight", "changed within a step")


@pytest.mark.parametrize("way", ["in place", "data in place", "data"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_weight_that_is_written_alike_trains_right_with_one_copy(way, schedule):
    # Also where the forward is run again: the same is written then.
    def make():
        return [linear(), Writes(way), nn.Tanh(), linear()]

    ranks = by_ranks(make, batches(3), 2, stages=2, microbatches=4, schedule=schedule)
    assert_as_plain(ranks, by_a_plain_loop(make, batches(3)))


def test_tied_table_is_a_copy_on_each_rank_that_holds_it():
    class Head(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.weight = table.table.weight

        def forward(self, x):
            return F.linear(x, self.weight)

    def make():
        table = Table()
        return [table, linear(), nn.Tanh(), Head(table)]

    generator = torch.Generator().manual_seed(3)
    data = [(x, torch.randn(len(x), ROWS, generator=generator).double()) for x, _ in tokens()]
    ranks = by_ranks(make, data, 2, stages=2, microbatches=4)
    assert_refused(ranks, "layers.0.table.weight", "changed within a step")


def test_what_another_write_changes_again_is_refused_with_recomputation():
    # A micro-batch moved the teacher twice: in its forward, and when that was run again.
    def make():
        return [linear(), Teacher(), nn.Tanh(), linear()]

    again = by_ranks(make, batches(3), 2, stages=2, microbatches=4)
    assert_refused(again, "layers.1.teacher.weight", "recompute=never")
    once = by_ranks(make, batches(3), 2, stages=2, microbatches=4, recompute="never")
    assert_as_plain(once, by_a_plain_loop(make, batches(3)))


def test_replicas_that_train_apart_may_change_their_own():
    outer = {"every": 2}
    ranks = by_ranks(table_model, tokens(4), 2, stages=1, replicas=2, microbatches=2, outer=outer)
    assert all(rank.error is None and len(rank.trained.losses) == 4 for rank in ranks)


def test_changes_between_steps_are_the_users():
    def make():
        return [linear(), linear(), nn.Tanh(), linear()]

    def clamp(pipe, optimizer, step):
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.clamp_(-0.3, 0.3)

    for num_ranks, keywords in COPIES.values():
        ranks = by_ranks(make, batches(3), num_ranks, before_step=clamp, **keywords)
        assert all(rank.error is None for rank in ranks)


@pytest.mark.parametrize("how", ["evaluate", "predict"])
def test_change_in_an_evaluation_is_refused_before_training(how):
    def look(pipe, optimizer, step):
        own = pipe.share(8)
        inputs, targets = tokens()[0]
        if how == "evaluate":
            pipe.evaluate(inputs[own], targets[own])
        else:
            pipe.predict(inputs[own])

    class InEvaluation(Table):
        def forward(self, indices):
            self.table.max_norm = None if self.training else 0.5
            return super().forward(indices)

    def make():
        return [InEvaluation(), linear(), nn.Tanh(), linear()]

    keywords = {"stages": 1, "replicas": 2, "microbatches": 2}
    ranks = by_ranks(make, tokens(), 2, before_step=look, **keywords)
    assert_refused(ranks, "layers.0.table.weight", "within an evaluation")
