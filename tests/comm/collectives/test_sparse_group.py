"""Groups of many ranks, each connected with few: the same bits as a full mesh."""

from itertools import accumulate
from operator import add

import pytest
import torch

from gpipe_hpc.comm.collectives.bruck import partners
from gpipe_hpc.comm.collectives.group import PeerTensor
from gpipe_hpc.comm.collectives.hierarchy import hierarchical_all_reduce
from gpipe_hpc.comm.collectives.orders import in_gloo_order, in_rank_order, in_ring_order
from gpipe_hpc.comm.collectives.plan import PlanPosition
from gpipe_hpc.comm.world.threads import run_on_threads
from tests.comm.collectives.starts import ALL_REDUCES

from .wide_threads import Heard

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.complex64)


def part_of(rank: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of many magnitudes: another order of summing has other bits."""
    generator = torch.Generator().manual_seed(1000 * rank + length)
    numbers = torch.randn(length, 2, generator=generator, dtype=torch.float64)
    return (numbers[:, 0] * 10 ** numbers[:, 1]).to(dtype)


def uneven(length: int, size: int) -> list[int]:
    """Return how many elements each rank has: none, some have."""
    ends = sorted((i * i * 7) % (length + 1) for i in range(1, size))
    return [stop - start for start, stop in zip([0, *ends], [*ends, length], strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 11])
def test_sums_shards_and_broadcasts_have_the_bits_of_the_narrow_group(size: int):
    def body(world):
        heard, rank = Heard(world.world_group), world.rank
        wrong = []
        for length, dtype in [(n, torch.float32) for n in (0, 1, 2, 40)] + [(9, d) for d in DTYPES]:
            for act in (
                lambda group, own: group.start_all_reduce(own),
                lambda group, own: group.start_ordered_all_reduce(own),
                lambda group, own: group.start_broadcast(own, size - 1),
                lambda group, own: group.start_all_gather(own),
                lambda group, own: group.start_all_gather(own, uneven(len(own), size)),
            ):
                results = [part_of(rank, length, dtype) for _ in range(2)]
                for group, own in zip((heard.narrow, heard.wide), results, strict=True):
                    act(group, own).wait()
                if not torch.equal(*results):
                    wrong.append((length, dtype, act))
            counts = uneven(length, size)
            ours, theirs = (part_of(rank, length, dtype) for _ in range(2))
            came, known = (
                heard.narrow.all_to_all(ours, counts),
                heard.wide.all_to_all(theirs, counts),
            )
            if not all(map(torch.equal, came, known)) or len(came) != size:
                wrong.append((length, dtype, "all to all"))
            heard.narrow.all_gather(ours, counts)
            heard.wide.all_gather(theirs, counts)
            if not torch.equal(ours, theirs):
                wrong.append((length, dtype, "all gather"))
            for counts in (None, uneven(length, size)):
                results = [part_of(rank, length, dtype) for _ in range(2)]
                for group, own in zip((heard.narrow, heard.wide), results, strict=True):
                    group.start_reduce_scatter(own, counts).wait()
                shards = [
                    torch.tensor_split(own, size) if counts is None else torch.split(own, counts)
                    for own in results
                ]
                if not torch.equal(*(each[rank] for each in shards)):
                    wrong.append((length, dtype, counts))
        return wrong

    assert run_on_threads(size, body) == [[]] * size


@pytest.mark.parametrize("size", [2, 5, 8])
def test_the_greatest_objects_exchanges_and_plans_go_too(size: int):
    def body(world):
        heard, rank = Heard(world.world_group), world.rank
        group, few = heard.wide, len(heard.peers)
        greatest = torch.tensor([rank, -rank])
        group.all_reduce_max(greatest)
        for name, start in ALL_REDUCES.items():
            own = torch.full((13,), float(rank))
            start(group, own).wait()
            assert own.tolist() == [float(sum(range(size)))] * 13, name
        into, across = torch.zeros(3), (rank + size // 2) % size
        back = (rank - size // 2) % size
        sends = [PeerTensor(across, torch.full((3,), float(rank)))]
        group.start_exchange(sends, [PeerTensor(back, into)]).wait()
        assert into.tolist() == [float(back)] * 3
        assert group.sent.num_messages > 0
        return (
            few,
            greatest.tolist(),
            group.merge_object([rank], add),
            group.all_gather_object("x" * rank),
            group.gather_object(rank, 1),
            group.scatter_object([f"for {i}" for i in range(size)] if rank == 0 else None, 0),
            group.broadcast_object({"of": rank}, 1),
        )

    ranks = list(range(size))
    for rank, found in enumerate(run_on_threads(size, body)):
        assert found == (
            len(partners(PlanPosition(size, rank))),
            [size - 1, 0],
            ranks,
            ["x" * i for i in ranks],
            ranks if rank == 1 else None,
            f"for {rank}",
            {"of": 1},
        )


def test_what_ranks_merge_goes_along_a_tree():
    """Every rank heard every other's value: of 4,096 copies each."""

    def body(world):
        group = Heard(world.world_group).wide
        merged = group.merge_object(str(world.rank), add)
        before = group.sent.num_bytes
        assert group.merge_object("x" * 1000, max) == "x" * 1000
        return merged, group.sent.num_bytes - before

    for size in (5, 8):
        found = run_on_threads(size, body)
        assert {merged for merged, _ in found} == {"".join(map(str, range(size)))}
        # Upwards each rank but the first sends its own once; down a rank sends to three at most.
        assert max(num_bytes for _, num_bytes in found) < 3 * 1200 + 1200


def test_what_a_sum_sends_grows_with_the_logarithm():
    def body(world):
        group, own = Heard(world.world_group).wide, torch.ones(64)
        group.start_all_reduce(own).wait()
        return group.sent.num_bytes, group.sent.num_messages

    # Half of the vector in each of three rounds, and seven of its eight shards in three more, in
    # which shards from behind the last on are a message of their own.
    found = run_on_threads(8, body)
    assert {num_bytes for num_bytes, _ in found} == {3 * 128 + 7 * 32}
    assert max(num_messages for _, num_messages in found) <= 3 + 2 * 3


@pytest.mark.parametrize(("size", "num_partners"), [(2, 1), (33, 10), (1024, 19), (4096, 23)])
def test_a_rank_is_connected_with_two_for_each_power_of_two(size: int, num_partners: int):
    places = [PlanPosition(size, position) for position in (0, 1, size // 2, size - 1)]
    found = [partners(place) for place in places]
    assert [len(each) for each in found] == [num_partners] * 4
    for place, each in zip(places, found, strict=True):
        assert all(place.position in partners(PlanPosition(size, other)) for other in each)


@pytest.mark.parametrize("size", [100, 1024])
def test_a_hierarchical_sum_needs_few_more_connections(size: int):
    for position in (0, 1, size // 3, size - 1):
        place, hosts = PlanPosition(size, position), [i // 4 for i in range(size)]
        plan = hierarchical_all_reduce(place, 4 * size, hosts)
        peers = {m.peer for step in plan for part in step for m in part}
        assert len(peers - set(partners(place))) <= (size - 1).bit_length()


@pytest.mark.parametrize("order_of", [in_rank_order, in_gloo_order])
def test_an_order_adds_every_term_of_every_element_once(order_of):
    for count, size in ((0, 5), (3, 5), (1001, 7), (3_000_001, 3)):
        order = order_of(count, 4, size)
        assert len(order.counts) == size and sum(order.counts) == count
        for owner in range(size):
            assert sorted(order.chain(owner)) == list(range(size))
    ring = in_ring_order([3, 1, 2])
    assert ring.chain(0) == [1, 2, 0] and list(accumulate(ring.counts))[-1] == 6
