"""Many tensors broadcast as few, whatever their dtypes and strides."""

import torch

from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.collectives.packed import broadcast_packed
from gpipe_hpc.comm.world.threads import run_on_threads
from tests.comm.collectives.starts import BROADCASTS


def some(fill):
    """Return tensors that share nothing but the value of their elements."""
    return [
        torch.full((3, 5), fill),
        torch.full((7,), fill, dtype=torch.bfloat16),
        torch.full((), fill, dtype=torch.float64),
        torch.zeros(0),
        torch.full((4, 6), fill, dtype=torch.float64).t(),
        torch.full((2, 3, 4, 4), fill).to(memory_format=torch.channels_last),
        torch.full((3,), bool(fill)),
        torch.full((5,), int(fill), dtype=torch.int8),
        torch.full((3,), complex(fill, fill)).conj(),
        torch.full((2,), fill).to(torch.float8_e4m3fn),
    ]


def test_all_take_over_the_roots_values_in_packs_of_bounded_size():
    def body(world):
        sizes, started = [], []

        def start(group, flat, root):
            started.append(flat.nbytes)
            return group.start_broadcast(flat, root)

        for pack_bytes in (2**20, 200, 1):
            own = some(float(world.rank + 1))
            shapes = [(t.shape, t.dtype, t.stride()) for t in own]
            started.clear()
            assert broadcast_packed(
                world.world_group, own, 1, pack_bytes=pack_bytes, start=start
            ) == len(started)
            assert [(t.shape, t.dtype, t.stride()) for t in own] == shapes
            for mine, right in zip(own, some(2.0), strict=True):
                assert torch.equal(mine.to(torch.complex64), right.to(torch.complex64))
            sizes.append(list(started))
        return sizes

    for whole, bounded, alone in run_on_threads(3, body):
        assert len(whole) == 1 and len(alone) == len(some(0.0)) - 1
        # Larger than the bound is only what is a tensor by itself.
        assert 1 < len(bounded) < len(alone)
        assert all(size <= 200 or size in alone for size in bounded)


def test_our_own_algorithms_serve_too_and_one_rank_sends_nothing():
    def body(world):
        own = some(float(world.rank))
        broadcast_packed(
            world.world_group,
            own,
            2,
            start=lambda group, flat, root: BROADCASTS["scatter_ring"](
                group, flat, group.ranks.index(root)
            ),
        )
        return own[0][0, 0].item(), world.world_group.sent.num_bytes > 0

    assert run_on_threads(3, body) == [(2.0, True)] * 3
    assert broadcast_packed(SoloGroup(0), some(1.0), 0) == 0
