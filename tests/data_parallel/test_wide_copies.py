"""Many replicas, each connected to few others, train bitwise equal to a full mesh."""

import pytest
import torch

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.settings import Outer
from tests.comm.collectives.wide_threads import WideWorld
from tests.support import batches, choices_of, linears, product, square_sum

SIZE, WIDTH, STEPS = 10, 5, 3
SUMS = [
    *({"order": order} for order in choices_of(Outer, "order")),
    *({"hierarchy": name} for name in (*("none", "host")[1:], SIZE // 2)),
    *({"compress": name, "topk_fraction": 0.2} for name in choices_of(Outer, "compress")[1:]),
]
SHARDED = [
    {"shard": name} for name in choices_of(Outer, "shard") if name != "oss"
]  # oss is tested with processes
SHARDED += [{"shard": "flat", "order": "rank"}]
LOCAL_SGD = [{"every": 2, "behind": 1, "parts": 2} | each for each in SUMS]
# Regression: the several rounds of a PowerSGD sum were mixed with other sums of the wide group.
SLOW_SUMS = [each for each in LOCAL_SGD if each.get("compress") == "powersgd"]


def trained(world, outer, path):
    """Train three steps, save a checkpoint, and return losses, weights and the outer state."""
    pipe = Pipeline(
        linears(3, WIDTH),
        square_sum,
        stages=1,
        replicas=world.size,
        microbatches=1,
        world=world,
        outer=outer | {"bucket_bytes": 150},
    )
    optimizer = pipe.optimizer(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    losses = []
    for inputs, targets in batches(STEPS, 2 * world.size, WIDTH):
        part = pipe.share(len(inputs))
        losses.append(pipe.step(inputs[part].float(), targets[part].float()).loss)
        optimizer.step()
    pipe.save(path, optimizer)
    state = {name: each.clone() for name, each in pipe.outer_state().items()}
    return losses, {n: p.detach().clone() for n, p in pipe.named_parameters()}, state


@pytest.mark.parametrize(
    "outer",
    [
        *SUMS,
        *SHARDED,
        *SLOW_SUMS,
        *(product(each) for each in LOCAL_SGD if each not in SLOW_SUMS),
    ],
    ids=lambda outer: "-".join(f"{name}={value}" for name, value in outer.items()),
)
def test_sparse_group_trains_bitwise_equal_to_a_full_mesh(outer, tmp_path, stored_tensors):
    def narrow(world):
        return trained(world, outer, tmp_path / "narrow")

    def wide(world):
        world = WideWorld(world)
        found = trained(world, outer, tmp_path / "wide")
        return found, [(each.narrow.size, len(each.peers)) for each in world.heard]

    for mesh, (ours, peers) in zip(
        run_on_threads(SIZE, narrow), run_on_threads(SIZE, wide), strict=True
    ):
        torch.testing.assert_close(ours, mesh, rtol=0, atol=0)
        # Of 9 peers: those at distance 1, 2 and 4 in both directions, and two for an algorithm.
        assert peers and max(number for _, number in peers) <= 8, peers
        assert {size for size, _ in peers} == {SIZE}
    torch.testing.assert_close(
        *(stored_tensors(tmp_path / name) for name in ("wide", "narrow")), rtol=0, atol=0
    )


def test_state_sharded_over_many_replicas_is_saved_whole(tmp_path, stored_tensors):
    """Nine replicas hold parts of each weight and its momentum, and send them to the writer."""
    for name, shard in (("whole", "none"), ("divided", "flat")):
        outer = {"shard": shard, "order": "rank"}
        run_on_threads(SIZE, lambda world, o=outer, n=name: trained(world, o, tmp_path / n))
    whole, divided = (stored_tensors(tmp_path / name) for name in ("whole", "divided"))
    assert whole.keys() == divided.keys() and any("momentum" in name for name in whole)
    assert all(torch.equal(whole[name], divided[name]) for name in whole)
