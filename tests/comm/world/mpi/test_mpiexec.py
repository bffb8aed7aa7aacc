"""Ranks under a real mpiexec: one start of two ranks, and one of four, for all there is to see.

What ranks on threads give is the reference: others hold that against the plain loop.
"""

import pytest
import torch

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.collectives.halving import rabenseifner_all_reduce
from gpipe_hpc.data_parallel import buckets
from tests.comm.collectives.starts import ALL_REDUCES, by_length
from tests.comm.world.mpi.program import KINDS, SIZES, drawn, make
from tests.simulated.scenarios import ALL, on_cpu
from tests.support import batches, train_rank

PARTS = ("sums", "calls", "checkpoints")


class Left:
    """What the ranks of one mpiexec have left, and where."""

    def __init__(self, ranks, folder):
        self.ranks, self.folder, self.size = ranks, folder, len(ranks)

    def each(self, part, name):
        return [rank[part][name] for rank in self.ranks]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def left(request, parts_done, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpi")
    more = ("trainings",) if request.param == 4 else ()
    return Left(parts_done(request.param, folder, *PARTS, *more), folder)


def by_halves(terms):
    """Return the sum in the order that is promised: far partners first."""
    if len(terms) == 1:
        return terms[0]
    middle = len(terms) // 2
    return by_halves([one + two for one, two in zip(terms[:middle], terms[middle:], strict=True)])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sums_have_one_order_and_the_same_bits_on_all_ranks(left, kind):
    for size in SIZES:
        expected = by_halves([drawn(rank, size, kind) for rank in range(left.size)])
        assert all(torch.equal(own, expected) for own in left.each("sums", f"sum {kind} {size}"))


def test_two_ranks_sum_as_gloo_does(left):
    """With two terms there is one order: rounding alone could differ, as for float16."""
    if left.size != 2:
        return
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        expected = drawn(0, 20_003, kind) + drawn(1, 20_003, kind)
        assert torch.equal(left.ranks[0]["sums"][f"sum {kind} 20003"], expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_broadcast_arrives(left, kind):
    for size in SIZES:
        expected = drawn(left.size - 1, size, kind)
        for own in left.each("sums", f"broadcast {kind} {size}"):
            assert torch.equal(own, expected)


def test_a_long_message_goes_in_parts(left):
    expected = by_halves([drawn(rank, 20_003, torch.float64) for rank in range(left.size)])
    assert all(torch.equal(own, expected) for own in left.each("sums", "in parts"))


def test_memory_need_not_be_in_order(left):
    expected = by_halves([drawn(rank, 9, torch.float32) for rank in range(left.size)])
    assert all(torch.equal(own, expected.view(3, 3).t()) for own in left.each("sums", "turned"))


def test_algorithms_of_ours_run_over_it(left):
    expected = left.size * torch.arange(1000.0) + sum(range(left.size))
    for name in ALL_REDUCES:
        assert all(torch.equal(own, expected) for own in left.each("sums", name))
    greatest = torch.arange(5.0)
    assert all(torch.equal(own, greatest) for own in left.each("sums", "max"))


def test_calls_of_torch(left):
    n, ones = left.size, torch.ones
    owns = [torch.arange(4.0) + rank for rank in range(n)]
    triangle = n * (n - 1) / 2
    for rank, found in enumerate(each["calls"] for each in left.ranks):
        assert torch.equal(found["average"], sum(owns) / n)
        assert torch.equal(found["reduce"], sum(owns) if rank == 1 else owns[rank])
        assert torch.equal(torch.stack(found["all_gather"]), torch.stack(owns))
        assert torch.equal(found["all_gather_single"], torch.cat(owns))
        assert torch.equal(found["reduce_scatter"], ones(2) * (10 * rank * n + triangle))
        share = torch.arange(3.0 * n)[3 * rank : 3 * rank + 3] * (triangle + n)
        assert torch.equal(found["reduce_scatter_single"], share)
        if rank == 1:
            assert torch.equal(torch.stack(found["gather"]), torch.stack(owns))
        assert torch.equal(found["scatter"], ones(2) * rank)
        assert torch.equal(found["all_to_all_single"], 10 * torch.arange(float(n)) + rank)
        for source, came in enumerate(found["all_to_all"]):
            assert torch.equal(came, ones(rank + 1) * source)
        assert found["objects"] == [{"rank": each} for each in range(n)]
        assert torch.equal(found["ring"], owns[rank - 1])
        assert torch.equal(found["sparse"], torch.tensor([1.0] * n + [2.0 * n]))
        assert torch.equal(found["ddp"], ones(2, 3) * (2 * triangle / n))


def test_tensors_take_no_socket(left):
    """Over Gloo each group that is formed listens on each of its ranks, and connects them."""
    for rank in left.ranks:
        before, after = rank["sockets"]
        assert after == before
        assert rank["groups"] == {"mpi4py"}


def test_a_checkpoint_goes_on_in_another_layout(left):
    """The other lay-out, and threads that load it, go on as the ranks that saved it."""
    on, again = ([rank["checkpoints"][name] for rank in left.ranks] for name in ("on", "again"))
    assert all(
        one.losses == pytest.approx(two.losses, rel=1e-12)
        for one, two in zip(on, again, strict=True)
    )

    def body(world):
        pipe = make(world, stages=2)
        pipe.load(left.folder / "saved")
        return train_rank(pipe, batches(4)[2:], 0.1)

    here = run_on_threads(2, body)
    assert here[0].losses == pytest.approx(on[0].losses, rel=1e-12)
    for step in range(2):
        united = {n: g for rank in again for n, g in rank.gradients[step].items()}
        for rank in here:
            for name, gradient in rank.gradients[step].items():
                assert (gradient - united[name]).abs().max() < 1e-10


OF_FOUR = [each for each in ALL if each.ranks == 4 and each.way is None]


def sum_in_the_order_of_mpi(scenario, monkeypatch):
    """Give sums on threads the order that they have over MPI.

    Four ranks hold each stage of a mirrored one, and threads add their terms in another order.
    BatchNorm makes rounding of that: the bias before it has a gradient of nothing else, from which
    AdamW makes a step of full length, and an evaluation, with statistics of other steps, shows it.
    """
    if scenario.name != "mirrored":
        return

    def by_hand(start):
        return lambda flat, items: by_length(rabenseifner_all_reduce, start.__self__, flat)

    monkeypatch.setattr(buckets, "_collective", by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("left", [4], indirect=True)
@pytest.mark.parametrize("scenario", OF_FOUR, ids=str)
def test_training_has_the_bits_of_threads(left, scenario, monkeypatch):
    """Losses, gradients, norms, weights, an evaluation and a prediction."""
    sum_in_the_order_of_mpi(scenario, monkeypatch)
    others = on_cpu(scenario)
    for own, other in zip(left.each("trainings", str(scenario)), others, strict=True):
        assert own.unlike(other) == []
