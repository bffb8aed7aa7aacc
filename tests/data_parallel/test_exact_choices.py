"""Exact reduction strategies train like one process, in every schedule, with tied weights."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.schedule import schedule_names
from tests.support import batches, square_sum

WIDTH, ROWS, MICROBATCHES = 4, 16, 8  # micro-batches of all replicas together
CHOICES = {
    "plain": {},
    "hierarchy": {"hierarchy": 2},
    "host": {"hierarchy": "host"},
    "order": {"order": "rank"},
    "flat": {"shard": "flat"},
    "flat_order": {"shard": "flat", "order": "rank"},
    "weights": {"weights": [3, 1]},
}
QUICK = (("zb_v", "except_last"), ("chimera", "always"))
RECOMPUTE = ("never", "except_last", "always")
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.product)
    for case in (
        (name, how) for name in sorted({*schedule_names()} - {"file", "auto"}) for how in RECOMPUTE
    )
]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + torch.tanh(self.drop(self.inner(x)))


def specs():
    end = LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64)
    ends = end.tied({"weight": "w"})
    return [ends, *(LayerSpec(Residual) for _ in range(6)), ends]


def train(world, stages, outer, **options):
    """Return the gradients of two steps before clipping, and the final weights."""
    replicas = world.size // stages
    pipe = Pipeline(
        specs(),
        square_sum,
        stages=stages,
        replicas=replicas,
        microbatches=MICROBATCHES // replicas,
        seed=5,
        world=world,
        partition="uniform",
        outer={"bucket_bytes": 200, **outer},
        **options,
    )
    optimizer = pipe.optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    found = []
    for inputs, targets in batches(2, ROWS, WIDTH):
        part = pipe.share(ROWS)
        pipe.step(inputs[part], targets[part])
        found.append({name: grad.clone() for name, grad in pipe.gradients().items()})
        pipe.clip_grad_norm_(0.5)
        optimizer.step()
    return [*found, {name: p.detach().clone() for name, p in pipe.named_parameters()}]


@pytest.fixture(scope="module")
def alone(on_threads):
    return on_threads(1, lambda world: train(world, 1, {}))[0]


def assert_matches_one_process(ranks, alone, plain, is_bitwise):
    """Compare all ranks with one process and, if `is_bitwise`, first gradients with `plain`."""
    for rank, (found, summed) in enumerate(zip(ranks, plain, strict=True)):
        assert found[0].keys() == summed[0].keys(), rank
        for ours, theirs in zip(found, alone, strict=True):
            for name, value in ours.items():
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-10)
        if is_bitwise:
            assert all(torch.equal(value, summed[0][name]) for name, value in found[0].items())


@pytest.mark.parametrize(("schedule", "recompute"), CASES)
def test_every_exact_strategy_matches_one_process_in_every_schedule(
    schedule, recompute, alone, on_threads
):
    """2 stages x 2 replicas. Gradients of stages on two ranks bitwise equal plain sums."""
    plain = None
    for name, outer in CHOICES.items():
        options = {"schedule": schedule, "recompute": recompute}
        ranks = on_threads(
            4, lambda world, outer=outer, options=options: train(world, 2, outer, **options)
        )
        plain = plain or ranks
        is_mirrored = schedule in ("chimera", "dualpipe", "dualpipe_v", "gems")
        # Unequal replicas add micro-batches in another order; so may four ranks with a stage.
        assert_matches_one_process(ranks, alone, plain, not is_mirrored and name != "weights")


@pytest.mark.parametrize(
    "recompute",
    [
        "except_last",
        pytest.param("never", marks=pytest.mark.product),
        pytest.param("always", marks=pytest.mark.product),
    ],
)
def test_every_exact_strategy_matches_one_process_on_four_replicas(recompute, alone, on_threads):
    """1 stage x 4 replicas."""
    plain = None
    for outer in CHOICES.values():
        weights = {"weights": [3, 1, 2, 2]} if "weights" in outer else {}
        ranks = on_threads(
            4,
            lambda world, outer={**outer, **weights}: train(world, 1, outer, recompute=recompute),
        )
        plain = plain or ranks
        assert_matches_one_process(ranks, alone, plain, False)


SENT = [
    ({"order": "rank"}, 2),
    ({"shard": "flat"}, 1),  # to reduce gradients; gathering parameters sends as much again
]


@pytest.mark.parametrize(("ranks", "stages"), [(4, 2), (4, 1)])
@pytest.mark.parametrize(("outer", "times"), SENT, ids=str)
def test_rank_sends_gradients_of_its_own_stage_only(outer, times, ranks, stages, on_threads):
    """HyPar-Flow: 2 (R-1)/R times the bytes of the stage's own parameters."""
    counts = [1, 3] if stages == 2 else [4]

    def body(world):
        pipe = Pipeline(
            [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False, dtype=torch.float64)] * 4,
            square_sum,
            stages=stages,
            replicas=ranks // stages,
            microbatches=2,
            world=world,
            partition=counts,
            outer={"bucket_bytes": 200, **outer},
        )
        pipe.optimizer(lambda p: torch.optim.SGD(p, lr=0.1))
        (group,) = {id(g): g for g in pipe._steps._wiring.reductions.values()}.values()
        (inputs, targets), part = batches(1, ROWS, WIDTH)[0], pipe.share(ROWS)
        before = group.sent.num_bytes
        pipe.step(inputs[part], targets[part])
        return group.sent.num_bytes - before

    replicas = ranks // stages
    layer = 8 * WIDTH * WIDTH
    theory = [times * layer * n * (replicas - 1) // replicas for n in counts] * replicas
    assert on_threads(ranks, body) == theory
