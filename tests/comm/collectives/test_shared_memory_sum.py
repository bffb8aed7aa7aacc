"""Sums in shared memory: their order, the cases that Gloo keeps, and failures."""

import time

import pytest
import torch
import torch.distributed as dist

from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice


def control_group(**options):
    """Return a world and its group of all ranks that steps use."""
    world = ProcessWorld(HostDevice(), 30.0, **options)
    return world, world.control_group([range(world.size)])


def refuse_gloo(monkeypatch):
    def refused(*args, **keywords):
        raise AssertionError("expected no all-reduce of torch")

    monkeypatch.setattr(dist, "all_reduce", refused)


def tensors(rank):
    """Yield tensors of several dtypes and layouts; their sums depend on the order."""
    for number in range(40):
        generator = torch.Generator().manual_seed(100 * number + rank)
        values = torch.randn(number % 7, 3, generator=generator, dtype=torch.float64) * 10**rank
        yield values.clone()
        yield values.float().t()
        yield (values * 1000).long()
    yield torch.tensor(0.1 * (rank + 1))


def test_sums_are_added_in_rank_order_without_gloo(processes, tmp_path, monkeypatch):
    refuse_gloo(monkeypatch)

    def body(rank):
        _, group = control_group()
        found = []
        for tensor in tensors(rank):
            group.all_reduce(tensor)
            found.append(tensor.tolist())
        return found

    found = processes(3, body, tmp_path)
    expected = [((a + b) + c).tolist() for a, b, c in zip(*map(tensors, range(3)), strict=True)]
    assert found == [expected] * 3


def test_levels_sum_in_shared_memory(processes, tmp_path, monkeypatch):
    refuse_gloo(monkeypatch)

    def body(rank):
        _, group = control_group(width=2)
        tensor, called = torch.tensor([float(rank)]), []
        group.all_reduce_hierarchical(tensor, called.append)
        return tensor.item(), called

    assert processes(4, body, tmp_path) == [(6.0, [0]), (6.0, []), (6.0, [1]), (6.0, [])]


@pytest.mark.parametrize(
    ("size", "shares"), [(2**14, True), (1, False)], ids=["large", "not shared"]
)
def test_gloo_sums_large_tensors_and_those_of_ranks_that_share_no_memory(
    processes, tmp_path, monkeypatch, size, shares
):
    calls = []
    summed = dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda *args, **kw: calls.append(1) or summed(*args, **kw)
    )

    def body(rank):
        _, group = control_group(shares_memory=shares or rank == 0)
        tensor = torch.full((size,), rank + 1.0, dtype=torch.float64)
        group.all_reduce(tensor)
        return tensor.unique().tolist(), len(calls)

    assert processes(2, body, tmp_path) == [([3.0], 1)] * 2


def test_tensors_of_different_shapes_are_refused(processes, tmp_path):
    def body(rank):
        _, group = control_group()
        with pytest.raises(ConnectionError, match="expected a tensor"):
            group.all_reduce(torch.zeros(1 + rank))
        return True

    assert processes(2, body, tmp_path) == [True, True]


@pytest.mark.parametrize("ending", ["exits", "fails"])
def test_a_rank_that_ends_stops_the_sum_of_the_others(processes, tmp_path, ending):
    def body(rank):
        world, group = control_group()
        group.all_reduce(torch.zeros(1))
        if rank == 1:
            if ending == "fails":
                world.fail("rank 1: gave up")
            return None
        began_s = time.monotonic()
        with pytest.raises(ConnectionError, match="lost rank 1"):
            group.all_reduce(torch.zeros(1))
        return time.monotonic() - began_s < 10.0

    assert processes(2, body, tmp_path) == [True, None]
