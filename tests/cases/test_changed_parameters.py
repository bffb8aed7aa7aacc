"""Parameters that a forward writes into: refused if copies on several ranks differ afterwards.

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
    """Follows its student, a little with each micro-batch; a parameter that is not trained.

    `way`: "data" gives it other memory, "data in place" leaves even its version as it was; "graph"
    does so only where a graph is made.
    """

    def __init__(self, way="data"):
        super().__init__()
        self.way = way
        self.student = linear()
        self.teacher = linear().requires_grad_(False)

    def forward(self, x):
        makes_graph = torch.is_grad_enabled()
        with torch.no_grad():
            for own, other in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                if self.way == "data":
                    own.data = 0.9 * own.data + 0.1 * other.data
                elif self.way == "data in place" or makes_graph:
                    own.data.mul_(0.9).add_(other.data, alpha=0.1)
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
@pytest.mark.parametrize("by_data", [False, True])
def test_rows_that_are_renormalised_again_to_rounding_are_no_harm(layout, by_data):
    # In float32 a row that was scaled to the norm may still be longer by the last bit.
    class Normalised(nn.Embedding):
        def forward(self, rows):
            self.weight.data.div_(torch.linalg.vector_norm(self.weight.data, dim=1, keepdim=True))
            return super().forward(rows)

    def make():
        table = Normalised(256, 32) if by_data else nn.Embedding(256, 32, max_norm=0.5)
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


@pytest.mark.parametrize("width", [3, 5])
@pytest.mark.parametrize("layout", COPIES)
def test_parameters_of_an_odd_number_of_bytes_in_words_are_compared(layout, width):
    """Their bits cannot be viewed as words of eight bytes."""

    class Clamps(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    def make():
        layers = [nn.Linear(WIDTH, width), Clamps(width, width), Clamps(width, width)]
        return [*layers, nn.Linear(width, WIDTH)]

    data = [(x.float(), y.float()) for x, y in batches(3)]
    num_ranks, keywords = COPIES[layout]
    ranks = by_ranks(make, data, num_ranks, **{**keywords, "recompute": "always"})
    plain = by_a_plain_loop(make, data)
    assert [rank.error for rank in ranks] == [None] * num_ranks
    torch.testing.assert_close(ranks[0].trained.losses, plain.losses, rtol=1e-5, atol=1e-5)


def writing_model(way):
    return lambda: [linear(), Writes(way), nn.Tanh(), linear()]


@pytest.mark.parametrize("way", ["in place", "data in place", "data"])
@pytest.mark.parametrize("layout", COPIES)
def test_weight_that_all_copies_write_alike_trains_right(way, layout):
    # It was refused, whatever was written.
    num_ranks, keywords = COPIES[layout]
    make = writing_model(way)
    ranks = by_ranks(make, batches(5), num_ranks, **keywords)
    if (layout, way) == ("flat", "data"):  # the optimizer updates the memory that it has divided
        assert_refused(ranks, "layers.1.inner.weight", "no longer a view", "outer.shard=none")
    elif (layout, way) == ("never", "in place"):  # as in plain torch with both forwards first
        assert_refused(ranks, "modified by an inplace operation")
    else:
        assert_as_plain(ranks, by_a_plain_loop(make, batches(5)))


@pytest.mark.parametrize("make", [table_model, bag_model])
@pytest.mark.parametrize("layout", ["replicas", "chimera"])
def test_copies_that_write_once_in_a_step_are_compared(make, layout):
    num_ranks, keywords = COPIES[layout]
    keywords = {**keywords, "microbatches": keywords["microbatches"] // 2, "recompute": "never"}
    ranks = by_ranks(make, tokens(), num_ranks, **keywords)
    assert_refused(ranks, "layers.0.table.weight", "changed within a step", "on other ranks")
    assert len({str(rank.error) for rank in ranks}) == 1


@pytest.mark.parametrize("layout", COPIES)
def test_teacher_that_moves_with_each_micro_batch_is_refused_where_there_are_copies(layout):
    # All copies came to the same values, but each by the micro-batches of its own rank only.
    num_ranks, keywords = COPIES[layout]
    keywords = {**keywords, "recompute": "never"}
    ranks = by_ranks(
        lambda: [linear(), Teacher(), nn.Tanh(), linear()], batches(3), num_ranks, **keywords
    )
    assert_refused(ranks, "layers.1.teacher.weight", "changed within a step", "each micro-batch")


class Later(nn.Module):
    """Begins to write in its ninth micro-batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.num_calls = linear(), 0
        self.shift = nn.Parameter(torch.ones(WIDTH).double(), requires_grad=False)

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls > 8:
            self.shift.mul_(0.9)
        return self.inner(x) + self.shift.detach()


def test_write_that_begins_later_is_refused_soon():
    # From then on by each micro-batch: compared in the step after the first that wrote.
    keywords = {"stages": 1, "replicas": 2, "microbatches": 2, "recompute": "never"}
    ranks = by_ranks(lambda: [linear(), Later()], batches(8), 2, **keywords)
    assert_refused(ranks, "layers.1.shift", "each micro-batch", steps=5)


def test_copies_are_compared_where_replicas_train_apart():
    keywords = {"stages": 2, "replicas": 2, "microbatches": 4, "schedule": "chimera"}
    keywords["outer"] = {"every": 2}
    refused = by_ranks(table_model, tokens(), 4, **keywords)
    assert_refused(refused, "layers.0.table.weight", "changed within a step")
    ranks = by_ranks(writing_model("in place"), batches(3), 4, **keywords)
    assert [rank.error for rank in ranks] == [None] * 4


@pytest.mark.parametrize("way", ["in place", "data in place", "data"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_weight_that_is_written_alike_trains_right_with_one_copy(way, schedule):
    # Also where the forward is run again: the same is written then.
    make = writing_model(way)
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


@pytest.mark.parametrize("way", ["data", "data in place", "graph"])
def test_what_another_write_changes_again_is_refused_with_recomputation(way):
    # A micro-batch moved the teacher twice: in its forward, and when that was run again; or only
    # then, after the forwards that should have seen it.
    def make():
        return [linear(), Teacher(way), nn.Tanh(), linear()]

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


def test_change_in_an_evaluation_that_was_alike_or_undone_is_no_harm():
    class InEvaluation(Table):
        def forward(self, indices):
            if not self.training:
                self.table.weight.data.mul_(1.0 + int(indices.sum()) if self.differs else 1.0)
                self.table.weight.data.clamp_(-3.0, 3.0)
            return super().forward(indices)

    def make(differs):
        layers = [InEvaluation(max_norm=None), linear(), nn.Tanh(), linear()]
        layers[0].differs = differs
        return layers

    def look(pipe, optimizer, step):
        known = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        pipe.predict(tokens()[0][0][pipe.share(8)])
        with torch.no_grad():
            for name, parameter in pipe.named_parameters():
                parameter.copy_(known[name])

    keywords = {"stages": 1, "replicas": 2, "microbatches": 2}
    for differs in (False, True):
        ranks = by_ranks(lambda d=differs: make(d), tokens(), 2, before_step=look, **keywords)
        assert_as_plain(ranks, by_a_plain_loop(lambda d=differs: make(d), tokens()))


def test_a_tied_weight_that_one_of_its_layers_clamps_is_refused_across_a_cut():
    """The other stage's copy is not clamped until the update; the remedy is one stage."""

    def make():
        first = Writes("data in place")
        return [first, nn.Tanh(), linear(), first.inner]

    data = [(3 * x, y) for x, y in batches(2)]
    refused = by_ranks(make, data, 2, stages=2, microbatches=4)
    assert_refused(refused, "layers.0.inner.weight", "layers that share it in one stage")
    assert_as_plain(by_ranks(make, data, 1, stages=1, microbatches=4), by_a_plain_loop(make, data))
