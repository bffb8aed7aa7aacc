"""Results of one rank on all ranks of its pipeline, whatever tensors they are."""

import torch

from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.steps import broadcast_nest


def results():
    """Return a nest of tensors of many kinds."""
    pictures = torch.arange(96.0).view(2, 3, 4, 4)
    return {
        "short": torch.arange(-3, 3, dtype=torch.int16),
        "unsigned": [torch.arange(4).to(dtype) for dtype in (torch.uint16, torch.uint64)],
        "eight bits": torch.ones(3).to(torch.float8_e4m3fn),
        "truth": torch.tensor(True),
        "pair": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "pictures": pictures.contiguous(memory_format=torch.channels_last),
        "nothing": torch.zeros(0, 5),
        "number": 7,
    }


def test_results_of_any_dtype_reach_all_ranks(processes, tmp_path):
    """Classes of int16 that a model predicts ended it: Gloo and NCCL have no name for them."""

    def body(rank):
        world = ProcessWorld(HostDevice(), 60.0)
        own = results() if rank == 1 else None
        found = broadcast_nest(own, world.world_group, 1, world)
        there = torch.utils._pytree.tree_leaves(found)
        for one, other in zip(there, torch.utils._pytree.tree_leaves(results()), strict=True):
            if isinstance(one, torch.Tensor):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                one, other = (t.to(torch.complex64).tolist() for t in (one, other))
            assert one == other
        return found["pictures"].is_contiguous(memory_format=torch.channels_last)

    assert processes(2, body, tmp_path) == [True, True]
