"""`schedule="auto"`: the order is searched for what the layers at hand cost."""

import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.planning import Partition
from gpipe_hpc.schedule import simulate

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
# Three stages of one layer, the middle one three times as slow.
SLOW, FAST = (3.0, 6.0, 3.0, 3.0), (1.0, 2.0, 1.0, 1.0)  # F, B, and of a split B its I and W
MEASURED = Partition((1, 1, 1), (3.0, 9.0, 3.0), "time", (FAST, SLOW, FAST))


def trained(schedule, partition, **options):
    """Return, of three ranks, the tables and rank 0's loss and gradient."""

    def body(world):
        layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(3)]
        pipe = Pipeline(
            layers,
            nn.functional.mse_loss,
            microbatches=6,
            schedule=schedule,
            schedule_options=options,
            partition=partition,
            recompute="never",
            world=world,
        )
        result = pipe.step(INPUTS, INPUTS)
        return pipe.schedule, result.loss, [p.grad for p in pipe.parameters()]

    return run_on_threads(3, body)


def test_the_search_sees_the_measured_costs():
    costs = MEASURED.stage_costs()
    for_measured = trained("auto", MEASURED)
    for_equal = trained("auto", [1, 1, 1])
    best_named = trained("zb_h1", MEASURED)

    def seconds(results):
        return simulate(results[0][0], costs).makespan

    assert seconds(for_measured) <= min(seconds(for_equal), seconds(best_named))
    assert for_measured[0][0].ranks != for_equal[0][0].ranks
    for one, other in zip(for_measured, best_named, strict=True):
        assert one[1] == other[1]
        torch.testing.assert_close(one[2], other[2])


def test_costs_that_are_given_win_over_measured_ones():
    given = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0}
    assert (
        trained("auto", MEASURED, costs=given)[0][0].ranks == trained("auto", [1, 1, 1])[0][0].ranks
    )
