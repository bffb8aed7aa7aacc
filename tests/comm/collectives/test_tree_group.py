"""Levels of groups, of threads: the same results as one group of all, and few connections."""

from functools import reduce
from math import ceil, log
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.comm.collectives.tree_group import WIDTH, TreeGroup, depth, own_tree_levels
from gpipe_hpc.comm.world.threads import ThreadWorld, run_on_threads

sizes = st.integers(1, 300)
widths = st.integers(2, 9)


@given(sizes, widths)
def test_each_level_is_made_of_the_firsts_of_the_one_below(num_ranks: int, width: int):
    of_all = [own_tree_levels(num_ranks, position, width) for position in range(num_ranks)]
    below = list(range(num_ranks))
    for level in range(depth(num_ranks, width)):
        groups = sorted({g for own in of_all for g in own[level : level + 1]}, key=min)
        assert [member for group in groups for member in group] == below
        assert all(position in own[level] for position, own in enumerate(of_all) if own[level:])
        below = [group[0] for group in groups]
    assert below == [0]


@given(st.integers(1, 100_000), st.integers(0, 100_000), widths)
def test_connections_grow_with_the_logarithm(num_ranks: int, position: int, width: int):
    own = own_tree_levels(num_ranks, position % num_ranks, width)
    assert sum(len(group) - 1 for group in own) <= (width - 1) * ceil(log(num_ranks, width) + 1e-9)


def levels(world: ThreadWorld, width: int) -> TreeGroup:
    groups = []
    for level in own_tree_levels(world.size, world.rank, width):
        groups.append(world.group([tuple(level)]))
    return TreeGroup(range(world.size), world.rank, groups, width)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(2, 4), st.data())
def test_levels_give_what_one_group_of_all_gives(num_ranks: int, width: int, data: st.DataObject):
    root = data.draw(st.integers(0, num_ranks - 1))

    ranks = list(range(num_ranks))

    def body(world: ThreadWorld) -> tuple[object, ...]:
        group, rank = levels(world, width), world.rank
        total = torch.tensor([1.0, 2.0**rank])
        group.all_reduce(total)
        started = torch.tensor([float(rank)])
        pending, calls = group.start_all_reduce(started), []
        pending.when_done(lambda: calls.append("done"))
        pending.wait()
        greatest = torch.tensor([rank, -rank])
        group.all_reduce_max(greatest)
        brought = torch.tensor([rank])
        group.broadcast(brought, root)
        tensors = total, started, greatest, brought
        return (
            *(tensor.tolist() for tensor in tensors),
            calls,
            group.broadcast_object({"rank": rank}, root),
            group.all_gather_object(str(rank)),
            group.gather_object(rank, root),
            group.merge_object([rank], add),
            group.scatter_object([f"for {each}" for each in ranks] if rank == 0 else None, 0),
        )

    for rank, found in enumerate(run_on_threads(num_ranks, body)):
        assert found == (
            [float(num_ranks), 2.0**num_ranks - 1],
            [float(sum(ranks))],
            [num_ranks - 1, 0],
            [root],
            ["done"],
            {"rank": root},
            [str(each) for each in ranks],
            ranks if rank == root else None,
            ranks,
            f"for {rank}",
        )


def test_a_merge_sees_values_in_the_order_of_ranks():
    """A first failure is the lowest rank's, whichever group hears of it first."""

    def body(world: ThreadWorld) -> str | None:
        own = f"rank {world.rank}" if world.rank in (4, 7) else None
        return levels(world, 3).merge_object(own, lambda ahead, behind: ahead or behind)

    assert run_on_threads(9, body) == ["rank 4"] * 9


@pytest.mark.parametrize("num_ranks", [1, WIDTH])
def test_few_ranks_are_one_group(num_ranks: int):
    assert own_tree_levels(num_ranks, 0) == [range(num_ranks)]
    assert reduce(add, [len(own_tree_levels(num_ranks, p)) for p in range(num_ranks)]) == num_ranks
