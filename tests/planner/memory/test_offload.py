"""What a rank holds of activations that move to the host and back, against the plan."""

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.models import build_gpt, token_cross_entropy
from gpipe_hpc.planner import CountedCosts, Example
from gpipe_hpc.planner.forecast import forecast
from gpipe_hpc.planner.memory.workspace import LiveBytes
from gpipe_hpc.schedule import Op

SPECS = build_gpt(vocab_size=3000, block_size=64, num_layers=4, num_heads=4, width=64)
SAMPLES, MICROBATCHES = 4, 6
TOKENS = torch.randint(3000, (SAMPLES * MICROBATCHES, 65), generator=torch.Generator())


class Apart(HostDevice):
    """The host's memory played as a device's, in which what is pinned does not count."""

    def pinned(self, shape, dtype):
        with _disable_current_modes():
            return torch.empty(shape, dtype=dtype)


def found_and_planned(world, precision, recompute, **settings):
    pipe = Pipeline(
        SPECS,
        token_cross_entropy,
        microbatches=MICROBATCHES,
        precision=precision,
        recompute=recompute,
        offload=True,
        world=world,
        **settings,
    )
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    pipe.step(inputs, targets)
    for parameter in pipe.parameters():
        parameter.grad = None
    with LiveBytes() as live:
        pipe.step(inputs, targets)
    example = Example(
        inputs[:SAMPLES], targets[:SAMPLES], token_cross_entropy, 0, pipe.world.device
    )
    model = CountedCosts(SPECS, example, precision, shares_casts=False).count
    layout = pipe.layout
    if world.rank:
        return live.most, None  # the table of all ranks is that of the first
    assert any(action.op is Op.OFFLOAD for row in pipe.schedule.ranks for action in row)
    ranks = forecast(model, pipe.partition.counts, layout.schedule, 0, layout.recomputed).ranks
    return live.most, [each.total_bytes - each.weight_bytes for each in ranks]


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_rank_holds_what_was_planned(precision, recompute):
    """Casts that a micro-batch which stays shared with none lasted until the step ended."""
    ((found, (planned,)),) = run_on_threads(
        1,
        lambda world: found_and_planned(world, precision, recompute),
        device=lambda rank: Apart(),
    )
    assert 0.95 * planned <= found <= 1.01 * planned


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("chimera", "never"), ("zb_h1", "never"), ("zb_h1", "always"), ("gpipe", "never")],
)
def test_ranks_hold_no_more_than_was_planned(schedule, recompute):
    """What had left and what came back lay side by side, and what I had used stayed until W."""
    (first, planned), *others = run_on_threads(
        4,
        lambda world: found_and_planned(
            world, "float32", recompute, schedule=schedule, partition="uniform"
        ),
        device=lambda rank: Apart(),
    )
    # Ranks that are threads share boundaries: those sent live as long as those taken.
    boundary = SAMPLES * 64 * 64 * 4
    found = [own - (MICROBATCHES + 1) * boundary for own in (first, *(own for own, _ in others))]
    assert all(own <= 1.035 * most for own, most in zip(found, planned, strict=True)), [
        round(own / most, 3) for own, most in zip(found, planned, strict=True)
    ]
