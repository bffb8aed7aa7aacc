"""Sums over a group whose backend lacks dtypes: brought over another path, or refused by name."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives import torch_group as module
from gpipe_hpc.comm.collectives.torch_group import TorchGroup
from gpipe_hpc.comm.watchdog.activity import ActivityTracker
from gpipe_hpc.comm.world.group_factory import ProcessGroupFactory
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ConfigError

LACKING = (torch.float64, torch.int16, torch.bool)


class Hosted(HostDevice):
    """A device whose memory is the host's: what was fetched from it bears a mark."""

    is_accelerator, type, backend = True, "xpu", "hccl"

    def holds(self, tensor):
        return not hasattr(tensor, "is_fetched")

    def to_host(self, tensor):
        fetched = tensor.clone()
        fetched.is_fetched = True
        return fetched


def joined(lacking):
    """Return a group of two ranks whose own backend refuses dtypes, and what it was given."""
    own, given = dist.all_reduce, []

    def all_reduce(tensor, *args, **kwargs):
        is_flag = tensor.dtype is torch.int64 and tensor.numel() == 1
        if not hasattr(tensor, "is_fetched") and not is_flag:
            given.append(tensor.dtype)
            if tensor.dtype in lacking:
                raise TypeError(f"Unsupported data type for HCCL process group: {tensor.dtype}")
        return own(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    module.uses_device_memory = module.accepts_device = lambda group, device: True
    group = ProcessGroupFactory("mine", timedelta(seconds=30), "gloo").form((0, 1))
    return TorchGroup(group, (0, 1), ActivityTracker(30.0, None, None), Hosted()), given


def summed(dtype, lacking, rank):
    group, given = joined(lacking)
    for _ in range(2):
        tensor = torch.tensor([rank, 1 - rank, 3 * rank, 0]).to(dtype)
        group.all_reduce(tensor)
        most = torch.tensor([rank, 0]).to(dtype)
        group.all_reduce_max(most)
    return tensor.tolist(), most.tolist(), given.count(dtype)


@pytest.mark.parametrize("dtype", LACKING, ids=str)
def test_what_the_backend_lacks_goes_by_way_of_the_host(dtype, processes, tmp_path):
    """Before, the first sum of losses raised the backend's own error, amid the first step."""
    sums = [True, True, True, False] if dtype is torch.bool else [1, 1, 3, 0]
    most = [dtype is torch.bool or 1, 0]
    found = processes(2, partial(summed, dtype, LACKING), tmp_path)
    assert found == [(sums, most, 1)] * 2, "asked once, by one element"


def test_what_the_backend_has_goes_there(processes, tmp_path):
    found = processes(2, partial(summed, torch.float32, (torch.float64,)), tmp_path)
    assert [each[:2] for each in found] == [([1.0, 1.0, 3.0, 0.0], [1.0, 0.0])] * 2
    assert all(each[2] > 2 for each in found)


def refused(rank):
    group, _ = joined((torch.float64, torch.float32))
    with pytest.raises(ConfigError) as caught:
        group.all_reduce(torch.zeros(3, dtype=torch.float64))
    return str(caught.value)


def test_a_backend_that_sums_nothing_is_refused_by_name(processes, tmp_path):
    for text in processes(2, refused, tmp_path):
        assert "backend: hccl failed to sum torch.float32 over ranks 0, 1" in text
        assert "Unsupported data type" in text and "use comm.backend=gloo" in text


def moved(rank):
    """Broadcast and gather what no backend has a name for."""
    group, _ = joined(())
    shown = []

    def seen(call):
        def wrapper(*args, **kwargs):
            shown.extend(a.dtype for a in args if isinstance(a, torch.Tensor))
            return call(*args, **kwargs)

        return wrapper

    dist.broadcast, dist.all_gather_into_tensor = map(
        seen, (dist.broadcast, dist.all_gather_into_tensor)
    )
    tensor = torch.full((3,), 7 - 5 * rank, dtype=torch.int16)
    group.broadcast(tensor, 0)
    whole = torch.zeros(4, dtype=torch.int16)
    whole[2 * rank : 2 * rank + 2] = rank + 1
    group.start_all_gather(whole).wait()
    return tensor.tolist(), whole.tolist(), set(shown) == {torch.uint8}


def test_what_is_only_moved_goes_as_bytes(processes, tmp_path):
    assert processes(2, moved, tmp_path) == [([7] * 3, [1, 1, 2, 2], True)] * 2
