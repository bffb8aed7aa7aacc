"""Our collectives against the plain sum, on threads: any number of ranks, length and dtype."""

import pytest
import torch

from gpipe_hpc.comm.collectives.group import PeerTensor, SoloGroup
from gpipe_hpc.comm.collectives.halving import rabenseifner_all_reduce
from gpipe_hpc.comm.collectives.planned import (
    start_all_gather,
    start_ordered_all_reduce,
    start_ring_all_reduce,
)
from gpipe_hpc.comm.collectives.shards import shards
from gpipe_hpc.comm.world.threads import run_on_threads
from tests.comm.collectives.starts import ALL_REDUCES, BROADCASTS, REDUCE_SCATTERS, by_length

SIZES = range(1, 10)
LENGTHS = (0, 1, 2, 3, 8, 13, 100)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def parts_of(size, length, dtype=torch.float64):
    """Return what each rank contributes."""
    torch.manual_seed(size * 1000 + length)
    if dtype in INTEGERS:
        return [torch.randint(0, 9, (length,)).to(dtype) for _ in range(size)]
    return [torch.randn(length, dtype=torch.float64).to(dtype) for _ in range(size)]


def in_rank_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def near(dtype, size):
    return 1e-12 if dtype is torch.float64 else size * torch.finfo(dtype).eps


def assert_sums(found, parts, algorithm):
    """Compare what all ranks hold with the plain sum, and with one another to the bit."""
    dtype, size, plain = parts[0].dtype, len(parts), in_rank_order(parts)
    assert all(torch.equal(each, found[0]) for each in found), (algorithm, size, dtype)
    if dtype in INTEGERS or size <= 2 or algorithm == "rank_order":
        assert torch.equal(found[0], plain), (algorithm, size, dtype)
    else:
        # The magnitudes that were added bound the error, not a sum in which they cancel.
        bound = near(dtype, size) * sum(part.double().abs() for part in parts)
        assert ((found[0].double() - plain.double()).abs() <= bound).all(), (algorithm, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_all_reduce_is_the_sum_with_the_same_bits_everywhere(algorithm, size):
    cases = [(length, torch.float64) for length in LENGTHS]
    cases += [(13, dtype) for dtype in FLOATS + INTEGERS]
    given = [parts_of(size, *case) for case in cases]

    def body(world):
        group, own = world.world_group, [parts[world.rank].clone() for parts in given]
        started = [ALL_REDUCES[algorithm](group, tensor) for tensor in own]
        for pending in started:
            pending.wait()
        return own

    for parts, found in zip(given, zip(*run_on_threads(size, body), strict=True), strict=True):
        assert_sums(found, parts, algorithm)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", BROADCASTS)
def test_broadcast_brings_the_roots_bits(algorithm, size):
    roots = sorted({0, size // 2, size - 1})
    given = [(root, parts_of(size, length)) for root in roots for length in LENGTHS]

    def body(world):
        own = [parts[world.rank].clone() for _, parts in given]
        for (root, _), tensor in zip(given, own, strict=True):
            BROADCASTS[algorithm](world.world_group, tensor, root).wait()
        return own

    for (root, parts), found in zip(
        given, zip(*run_on_threads(size, body), strict=True), strict=True
    ):
        assert all(torch.equal(each, parts[root]) for each in found), (algorithm, root)


def cuts(length, size):
    """Return ways to cut a vector into shards: even, with empty ones, and any."""
    own = [0] * size
    own[size // 2] = length
    some = [length // (i + 2) for i in range(size - 1)]
    while sum(some) > length:
        some[some.index(max(some))] //= 2
    return [None, own, [*some, length - sum(some)]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", REDUCE_SCATTERS)
def test_reduce_scatter_gives_each_rank_its_shard_of_the_sum(algorithm, size):
    given = [(parts_of(size, n), counts) for n in LENGTHS for counts in cuts(n, size)]

    def body(world):
        found = []
        for parts, counts in given:
            whole = parts[world.rank].clone()
            REDUCE_SCATTERS[algorithm](world.world_group, whole, counts).wait()
            found.append(shards(whole, counts, size)[world.rank])
        return found

    for (parts, counts), found in zip(
        given, zip(*run_on_threads(size, body), strict=True), strict=True
    ):
        expected = shards(in_rank_order(parts), counts, size)
        for mine, right in zip(found, expected, strict=True):
            bound = 1e-12 * sum(part.abs().max() if len(part) else 0.0 for part in parts)
            assert mine.shape == right.shape
            assert ((mine - right).abs() <= (bound if size > 2 else 0.0)).all()


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_gives_all_shards_to_every_rank(size):
    given = [(parts_of(1, n)[0], counts) for n in LENGTHS for counts in cuts(n, size)]

    def body(world):
        found = []
        for right, counts in given:
            whole = torch.full_like(right, float("nan"))
            shards(whole, counts, size)[world.rank].copy_(shards(right, counts, size)[world.rank])
            start_all_gather(world.world_group, whole, counts).wait()
            found.append(whole)
        return found

    for found in run_on_threads(size, body):
        for mine, (right, _) in zip(found, given, strict=True):
            assert torch.equal(mine, right)


def test_a_groups_own_reduce_scatter_and_all_gather_make_an_all_reduce():
    parts = parts_of(3, 10)

    def body(world):
        whole = parts[world.rank].clone()
        world.world_group.start_reduce_scatter(whole).wait()
        world.world_group.start_all_gather(whole).wait()
        return whole

    assert_sums(run_on_threads(3, body), parts, "ring")
    alone, whole = SoloGroup(0), parts[0].clone()
    alone.start_reduce_scatter(whole).wait()
    alone.start_all_gather(whole, [10]).wait()
    start_ring_all_reduce(alone, whole).wait()
    assert torch.equal(whole, parts[0])


def test_the_order_of_ranks_has_the_same_bits_however_the_vector_is_cut():
    size, length = 5, 101
    parts = parts_of(size, length, torch.float32)

    def body(world):
        found = []
        for cut in (length, 1, 7, 50):
            own = parts[world.rank].clone()
            pending = [
                start_ordered_all_reduce(world.world_group, bucket) for bucket in own.split(cut)
            ]
            for each in pending:
                each.wait()
            found.append(own)
        return found

    whole = in_rank_order(parts)
    for found in run_on_threads(size, body):
        assert all(torch.equal(each, whole) for each in found)
    # Else the test shows nothing: another order has other bits.
    assert not torch.equal(in_rank_order(parts[::-1]), whole)


def test_tensors_need_not_be_flat_nor_lie_in_one_row():
    def body(world):
        rows = torch.arange(12.0).reshape(3, 4) * (world.rank + 1)
        column, scalar = rows[:, 1:3], torch.tensor(2.0)
        start_ring_all_reduce(world.world_group, column).wait()
        by_length(rabenseifner_all_reduce, world.world_group, scalar).wait()
        return rows, scalar

    for rank, (rows, scalar) in enumerate(run_on_threads(3, body)):
        own = torch.arange(12.0).reshape(3, 4) * (rank + 1)
        own[:, 1:3] = torch.arange(12.0).reshape(3, 4)[:, 1:3] * 6
        assert torch.equal(rows, own) and scalar == 6.0


def test_exchanges_keep_their_order_and_may_be_waited_for_in_any():
    def body(world):
        group, other = world.world_group, 1 - world.rank
        into = [torch.zeros(2), torch.zeros(2)]
        pending = [
            group.start_exchange(
                [PeerTensor(other, torch.full((2,), 10.0 * world.rank + number))],
                [PeerTensor(other, came)],
            )
            for number, came in enumerate(into)
        ]
        for each in reversed(pending):
            each.wait()
        return [came[0].item() for came in into], group.sent.num_bytes, group.sent.num_messages

    assert run_on_threads(2, body) == [([10.0, 11.0], 16, 2), ([0.0, 1.0], 16, 2)]
