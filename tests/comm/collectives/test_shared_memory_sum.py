"""Sums in shared memory: their order, the cases that Gloo keeps, and failures."""

import errno
import socket
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
    """Yield tensors of several dtypes and sizes; their sums depend on the order."""
    for number in range(40):
        generator = torch.Generator().manual_seed(100 * number + rank)
        values = torch.randn(number, 3, generator=generator, dtype=torch.float64) * 10**rank
        yield values.clone()
        yield values.float()
        yield (values * 1000).long()
    yield torch.tensor(0.1 * (rank + 1))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_gloo(processes, tmp_path, size):
    def body(rank):
        _, group = control_group()
        used, shared_sum = [], group.shared_sum.all_reduce
        group.shared_sum.all_reduce = lambda tensor: used.append(1) or shared_sum(tensor)
        equal = []
        for tensor in tensors(rank):
            other = tensor.clone()
            group.all_reduce(tensor)
            group.start_all_reduce(other).wait()
            equal.append(torch.equal(tensor, other))
        return equal, len(used)

    assert processes(size, body, tmp_path) == [([True] * 121, 121)] * size


@pytest.mark.parametrize("layout", ["transposed", "sparse"])
def test_gloo_sums_tensors_that_are_not_dense(processes, tmp_path, layout):
    def body(rank):
        _, group = control_group()
        matrix = torch.arange(6.0).view(2, 3) * (rank + 1)
        tensor = matrix.t() if layout == "transposed" else matrix.to_sparse()
        group.all_reduce(tensor)
        return (tensor.t() if layout == "transposed" else tensor.to_dense()).tolist()

    expected = (torch.arange(6.0).view(2, 3) * 6).tolist()
    assert processes(3, body, tmp_path) == [expected] * 3


def test_tensors_that_require_gradients_and_of_inference_mode_are_summed(processes, tmp_path):
    def body(rank):
        _, group = control_group()
        leaf = torch.ones(2, requires_grad=True)
        result = leaf * 3
        with torch.inference_mode():
            inference = torch.ones(2)
        for tensor in (leaf, result, inference):
            group.all_reduce(tensor)
        return leaf.tolist(), leaf.is_leaf, result.tolist(), inference.tolist()

    expected = [2.0, 2.0], True, [6.0, 6.0], [2.0, 2.0]
    assert processes(2, body, tmp_path) == [expected] * 2


def test_a_message_that_is_not_accepted_at_once_is_sent_before_the_sum_returns(
    processes, tmp_path, monkeypatch
):
    """Otherwise the other rank would wait until this one communicates again."""

    def body(rank):
        _, group = control_group()
        if rank == 0:
            send_fds, failures = socket.send_fds, iter(range(2))

            def send(*args):
                for _ in failures:
                    raise OSError(errno.ETOOMANYREFS, "too many references")
                return send_fds(*args)

            monkeypatch.setattr(socket, "send_fds", send)
            time.sleep(0.3)  # the message of rank 1 has arrived, so rank 0 need not wait for it
        tensor = torch.tensor([rank + 1.0])
        group.all_reduce(tensor)
        began_s = time.monotonic()
        if rank == 0:
            return tensor.item(), (tmp_path / "has_sum").exists() or waited(tmp_path)
        (tmp_path / "has_sum").touch()
        return tensor.item(), time.monotonic() - began_s < 10.0

    def waited(folder):
        """Return whether rank 1 gets its sum although this rank does nothing else."""
        deadline_s = time.monotonic() + 10.0
        while not (folder / "has_sum").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return (folder / "has_sum").exists()

    assert processes(2, body, tmp_path) == [(3.0, True)] * 2


def test_a_rank_that_does_not_respond_is_named(processes, tmp_path):
    def body(rank):
        world = ProcessWorld(HostDevice(), 1.0)
        group = world.control_group([range(2)])
        if rank == 1:
            time.sleep(4.0)
            return True
        with pytest.raises(TimeoutError, match=r"waiting for rank 1$"):
            group.all_reduce(torch.zeros(1))
        return True

    assert processes(2, body, tmp_path) == [True, True]


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


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2,), torch.float64), ((1,), torch.float32)], ids=["shape", "dtype"]
)
def test_different_tensors_are_refused(processes, tmp_path, shape, dtype):
    def body(rank):
        _, group = control_group()
        own = torch.zeros(1, dtype=torch.float64)
        with pytest.raises(ConnectionError, match=r"sum over ranks 0, 1: expected .* from rank"):
            group.all_reduce(own if rank == 0 else torch.zeros(shape, dtype=dtype))
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
