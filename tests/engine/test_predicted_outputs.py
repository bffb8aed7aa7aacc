"""Broadcast of predicted outputs from one rank to all ranks of its pipeline."""

import torch

from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.steps import broadcast_nest


def nest_of_many_dtypes():
    """Return a nest of tensors with different dtypes, shapes and memory formats."""
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


def test_outputs_of_any_dtype_are_broadcast_to_all_ranks(processes, tmp_path):
    """Regression: predicting int16 classes raised an error, as Gloo and NCCL lack this dtype."""

    def body(rank):
        world = ProcessWorld(HostDevice(), 60.0)
        own = nest_of_many_dtypes() if rank == 1 else None
        found = broadcast_nest(own, world.world_group, 1, world)
        received_leaves = torch.utils._pytree.tree_leaves(found)
        for one, other in zip(
            received_leaves, torch.utils._pytree.tree_leaves(nest_of_many_dtypes()), strict=True
        ):
            if isinstance(one, torch.Tensor):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                one, other = (t.to(torch.complex64).tolist() for t in (one, other))
            assert one == other
        return found["pictures"].is_contiguous(memory_format=torch.channels_last)

    assert processes(2, body, tmp_path) == [True, True]
