"""Many copies of a stage, each connected with few: every choice trains to the bits of a mesh."""

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
DIVIDED = [
    {"shard": name} for name in choices_of(Outer, "shard") if name != "oss"
]  # that is tried on processes
DIVIDED += [{"shard": "flat", "order": "rank"}]
APART = [{"every": 2, "behind": 1, "parts": 2} | each for each in SUMS]
# Its sums take several rounds, and came into the row of the wide group between others.
SLOW_SUMS = [each for each in APART if each.get("compress") == "powersgd"]


def trained(world, outer, path):
    """Train a few steps, save, and return what is left of them."""
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
        *DIVIDED,
        *SLOW_SUMS,
        *(product(each) for each in APART if each not in SLOW_SUMS),
    ],
    ids=lambda outer: "-".join(f"{name}={value}" for name, value in outer.items()),
)
def test_training_has_the_bits_of_a_mesh_over_few_connections(outer, tmp_path, stored_tensors):
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
        # Of 9 others: those 1, 2 and 4 places away both ways, and two that an algorithm needs.
        assert peers and max(number for _, number in peers) <= 8, peers
        assert {size for size, _ in peers} == {SIZE}
    torch.testing.assert_close(
        *(stored_tensors(tmp_path / name) for name in ("wide", "narrow")), rtol=0, atol=0
    )


def test_states_that_lie_on_many_copies_are_saved_whole(tmp_path, stored_tensors):
    """Each weight and its momentum lie on nine copies; those hand them on to the writer."""
    for name, shard in (("whole", "none"), ("divided", "flat")):
        outer = {"shard": shard, "order": "rank"}
        run_on_threads(SIZE, lambda world, o=outer, n=name: trained(world, o, tmp_path / n))
    whole, divided = (stored_tensors(tmp_path / name) for name in ("whole", "divided"))
    assert whole.keys() == divided.keys() and any("momentum" in name for name in whole)
    assert all(torch.equal(whole[name], divided[name]) for name in whole)
