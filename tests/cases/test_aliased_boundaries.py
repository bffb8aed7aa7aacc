"""Tensors that a layer returns twice, or with views of them, mean the same wherever a cut lies."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import GpipeError
from tests.support import assert_close, batches, mean_square, together, train_plainly, train_ranks

DATA = batches(2)
RECOMPUTE = ("never", "except_last", "always")


class Start(nn.Module):
    """Return a tensor and something else that lies in its memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.kind == "twice":
            return y, y
        if self.kind == "in a dict":
            return {"hidden": y, "more": [y + 2, y]}
        if self.kind == "a view":
            return y, y[:, 1:]
        if self.kind == "all of it":
            return y, y.view_as(y)
        if self.kind == "detached":
            return y, y.detach()
        assert self.kind == "halves"
        return y[:, :2], y[:, 2:]


class Pass(nn.Module):
    """Read, and pass everything on."""

    def forward(self, nest: Any) -> Any:
        return nest


class Writes(nn.Module):
    """Write in place into the first tensor."""

    def forward(self, nest: Any) -> Any:
        first = nest["hidden"] if isinstance(nest, dict) else nest[0]
        first.mul_(3.0)
        return nest


class Asks(nn.Module):
    """Do something else for one tensor than for two."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        one, other = pair
        return one, torch.tanh(other) if one is other else other


class End(nn.Module):
    """Use everything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, nest: Any) -> Tensor:
        if isinstance(nest, dict):
            return self.linear(nest["hidden"] * nest["more"][0] + nest["more"][1])
        one, other = nest
        if one.shape[1] == 2:
            return self.linear(torch.cat([one, other], 1))
        return self.linear(one + nn.functional.pad(other, (4 - other.shape[1], 0)))


def cuts(layers: int, stages: int) -> list[list[int]]:
    """Return all ways to cut so many layers."""
    ends = itertools.combinations(range(1, layers), stages - 1)
    bounds = ([0, *inner, layers] for inner in ends)
    return [[b - a for a, b in itertools.pairwise(each)] for each in bounds]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("middle", [Writes, Asks])
def test_a_tensor_returned_twice_arrives_as_one(middle, recompute):
    layers = [Start("twice"), Pass(), middle(), End()]
    right = train_plainly(layers, mean_square, DATA)
    for counts in cuts(4, 2) + cuts(4, 3):
        ours = train_ranks(
            layers, mean_square, DATA, ranks=len(counts), microbatches=4, partition=counts,
            recompute=recompute,
        )  # fmt: skip
        assert_close(together(ours), right, 1e-12)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v", "interleaved", "dualpipe_v", "chimera"])
@pytest.mark.parametrize("kind", ["twice", "in a dict"])
def test_it_does_so_in_every_kind_of_schedule(kind, schedule):
    layers = [Start(kind), Pass(), Writes(), End()]
    right = train_plainly(layers, mean_square, DATA)
    ours = train_ranks(
        layers, mean_square, DATA, ranks=2, microbatches=4, partition="uniform",
        schedule=schedule, recompute="always",
    )  # fmt: skip
    assert_close(together(ours), right, 1e-12)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["a view", "all of it", "detached", "halves", "in a dict"])
def test_views_that_are_only_read_keep_working(kind, recompute):
    layers = [Start(kind), Pass(), End()]
    right = train_plainly(layers, mean_square, DATA)
    for counts in ([1, 1, 1], [2, 1], [1, 2]):
        ours = train_ranks(
            layers, mean_square, DATA, ranks=len(counts), microbatches=4, partition=counts,
            recompute=recompute,
        )  # fmt: skip
        assert_close(together(ours), right, 1e-12)


@pytest.mark.parametrize("counts", [[1, 3], [2, 2], [1, 1, 2], [1, 2, 1]])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["a view", "all of it", "detached"])
def test_views_that_are_written_to_behind_a_cut_are_refused_by_name(kind, recompute, counts):
    with pytest.raises(GpipeError, match=r"layers\.2 \(Writes\): wrote in place into tensor 0 of"):
        train_ranks(
            [Start(kind), Pass(), Writes(), End()], mean_square, DATA, ranks=len(counts),
            microbatches=1, partition=counts, recompute=recompute,
        )  # fmt: skip


def test_views_that_are_written_to_within_a_stage_train_as_in_one_piece():
    layers = [Start("a view"), Writes(), Pass(), End()]
    right = train_plainly(layers, mean_square, DATA)
    for counts in ([2, 2], [3, 1]):
        ours = train_ranks(
            layers, mean_square, DATA, ranks=2, microbatches=4, partition=counts, recompute="always"
        )
        assert_close(together(ours), right, 1e-12)


@pytest.mark.parametrize("counts", [[1, 2], [2, 1]])
def test_parts_of_one_tensor_that_have_nothing_in_common_may_be_written_to(counts):
    layers = [Start("halves"), Writes(), End()]
    right = train_plainly(layers, mean_square, DATA)
    ours = train_ranks(
        layers, mean_square, DATA, ranks=2, microbatches=4, partition=counts, recompute="always"
    )
    assert_close(together(ours), right, 1e-12)


def test_evaluation_and_prediction_see_one_tensor_too():
    torch.manual_seed(0)
    layers = [Start("twice"), Writes(), End()]
    x, y = DATA[0]
    with torch.no_grad():
        right = nn.Sequential(*layers)(x)

    def body(world):
        pipe = Pipeline(layers, mean_square, microbatches=2, partition=[1, 2], world=world)
        return pipe.evaluate(x, y).loss, pipe.predict(x)

    for loss, output in run_on_threads(2, body):
        assert abs(loss - float(mean_square(right, y))) < 1e-12
        torch.testing.assert_close(output, right, rtol=1e-12, atol=1e-12)


class Keeps(nn.Module):
    """Return something that lasts besides its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.kind = kind
        size = 10_000 if kind == "a large one" else 4
        self.register_buffer("kept", torch.ones(size, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "a view":
            return self.linear(x), self.kept[1:].unflatten(0, (3, 1))
        if self.kind == "a copy":
            return self.linear(x), self.kept.clone()
        if self.kind == "scratch":
            self.kept.copy_(x.detach().mean(0))
        return self.linear(x), self.frozen if self.kind == "frozen" else self.kept


class WritesSecond(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = pair
        second.add_(1.0)
        return first, second


class Adds(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(pair[0]) * pair[1].mean()


def assert_as_plain(layers: list[nn.Module], counts: list[int], recompute: str) -> None:
    right = train_plainly(layers, mean_square, DATA)
    ours = train_ranks(
        layers, mean_square, DATA, ranks=len(counts), microbatches=4, partition=counts,
        recompute=recompute,
    )  # fmt: skip
    right.buffers = together(ours).buffers  # a plain loop on copies tells of none
    assert_close(together(ours), right, 1e-12)


BUFFER_CUTS = [[4], [1, 3], [2, 2], [3, 1], [1, 1, 2]]


@pytest.mark.parametrize("counts", BUFFER_CUTS, ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["all of it", "a view"])
def test_a_buffer_that_another_layer_writes_to_is_refused_by_name(kind, recompute, counts):
    """The write was lost in one stage, and behind a cut it never came to the buffer."""
    stepped = []

    def body(world):
        layers = [Keeps(kind), Pass(), WritesSecond(), Adds()]
        options = {"microbatches": 2, "partition": counts, "recompute": recompute}
        Pipeline(layers, mean_square, world=world, **options).step(*DATA[0])
        stepped.append(world.rank)

    words = r"layers\.0 \(Keeps\): returned its buffer kept.*clone\(\)"
    if counts[0] < 3:
        words = r"layers\.2 \(WritesSecond\): wrote in place into tensor 1 of the.*\(clone\)"
    with pytest.raises(GpipeError, match=words):
        run_on_threads(len(counts), body)
    assert not stepped


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_frozen_parameter_that_is_written_to_behind_a_cut_is_refused(recompute):
    with pytest.raises(GpipeError, match=r"layers\.1 \(WritesSecond\): wrote in place"):
        assert_as_plain([Keeps("frozen"), WritesSecond(), Adds()], [1, 2], recompute)
    with pytest.raises(GpipeError, match=r"layers\.2 \(WritesSecond\): wrote in place"):
        assert_as_plain([Keeps("frozen"), Pass(), WritesSecond(), Adds()], [1, 1, 2], recompute)


@pytest.mark.parametrize("counts", BUFFER_CUTS, ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_buffer_that_is_only_read_or_a_copy_of_it_keeps_working(recompute, counts):
    for kind in ("all of it", "a view", "scratch", "frozen", "a large one"):
        assert_as_plain([Keeps(kind), Pass(), Pass(), Adds()], counts, recompute)
    assert_as_plain([Keeps("a copy"), Pass(), WritesSecond(), Adds()], counts, recompute)


@pytest.mark.parametrize(
    ("kind", "recompute"), [("scratch", r) for r in RECOMPUTE] + [("a large one", "never")]
)
def test_what_is_right_in_one_stage_stays_so(kind, recompute):
    assert_as_plain([Keeps(kind), Pass(), WritesSecond(), Adds()], [4], recompute)


class WritesSilently(nn.Module):
    """Write into the input in a way that changes no version."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "numpy":
            values = x.detach().numpy()
            values *= 2.0
        else:
            x.data.mul_(2.0)
        return self.linear(x)


@pytest.mark.parametrize("counts", [[3], [1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("way", ["numpy", "data"])
def test_silent_writes_into_the_input_are_those_of_one_piece(way, recompute, counts):
    """A recomputation found the input written to already: gradients were others."""
    linears = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
    assert_as_plain([linears[0], WritesSilently(way), linears[1]], counts, recompute)


class Fills(nn.Module):
    """Takes missing values as 0, and notes where its inputs lie."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.places = nn.Linear(4, 4, dtype=torch.float64), []

    def forward(self, x: Tensor) -> Tensor:
        self.places.append(x.data_ptr())
        return self.linear(x.nan_to_num())


def test_inputs_that_are_not_numbers_are_not_copied_for_ever():
    """They differ from themselves, which looked like a write: each step copied its inputs."""
    x, y = DATA[0]
    x = torch.where(x > x.mean(), torch.nan, x)
    layer = Fills()
    right = float(mean_square(layer(x), y).detach())
    pipe = Pipeline([layer, nn.Identity()], mean_square, stages=1, recompute="never")
    losses = [pipe.step(x, y).loss for _ in range(2)]
    assert losses == [pytest.approx(right, rel=1e-12)] * 2
    assert layer.places[-1] == x.data_ptr()
