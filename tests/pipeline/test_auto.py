"""`schedule="auto"` searches for a schedule that fits the costs of the layers."""

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner import LayerTimes, Partition
from gpipe_hpc.schedule import Costs, simulate
from gpipe_hpc.schedule.table.lifetimes import peak_activations

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
# Three stages of one layer; the middle one is three times as slow.
# Times of F and B, and of I and W of a split B.
SLOW, FAST = LayerTimes.alike(3.0, 6.0, 3.0, 3.0), LayerTimes.alike(1.0, 2.0, 1.0, 1.0)
MEASURED = Partition((1, 1, 1), (3.0, 9.0, 3.0), "time", (FAST, SLOW, FAST))


def trained(schedule, partition, ranks=3, num_layers=3, **options):
    """Return for each rank its schedule table, loss and named parameters after one step."""

    def body(world):
        layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(num_layers)]
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
        return pipe.schedule, result.loss, dict(pipe.named_parameters())

    return run_on_threads(ranks, body)


def test_search_uses_measured_costs():
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
        for name, parameter in one[2].items():
            torch.testing.assert_close(parameter.grad, other[2][name].grad)


def test_given_costs_override_measured_costs():
    given = {"forward": 1.0, "input_gradient": 1.0, "weight_gradient": 1.0}
    assert (
        trained("auto", MEASURED, costs=given)[0][0].ranks == trained("auto", [1, 1, 1])[0][0].ranks
    )


def test_best_placement_is_chosen_for_measured_layers():
    """With two stages per rank in a V, the second rank starts sooner."""
    measured = Partition((4, 4), (3.0,) * 8, "time", (FAST,) * 8)
    best = trained("auto", measured, ranks=2, num_layers=8, placement="best")
    plain = trained("gpipe", [4, 4], ranks=2, num_layers=8)
    table = best[0][0]
    assert table.placement.routes == ((0, 1, 1, 0),)
    assert (
        simulate(table, Costs(forward=2, backward=4, input_gradient=2, weight_gradient=2)).bubble
        < 0.05
    )
    expected = {name: p.grad for _, _, own in plain for name, p in own.items()}
    found = {name: p.grad for _, _, own in best for name, p in own.items()}
    assert best[0][1] == plain[0][1]
    torch.testing.assert_close(found, expected)


def test_best_placement_stays_within_the_activation_limit():
    """The limit counts micro-batches that all stages of a rank keep."""
    measured = Partition((4, 4), (3.0,) * 8, "time", (FAST,) * 8)
    table = trained("auto", measured, ranks=2, num_layers=8, placement="best", limit=2)[0][0]
    stages_per_rank = table.num_stages // 2
    assert max(peak_activations(row).size for row in table.ranks) <= 2 * stages_per_rank


def test_best_placement_requires_measured_layers():
    with pytest.raises(ConfigError, match=r"placement 'best'.*use partition 'time'"):
        trained("auto", "parameters", ranks=2, num_layers=8, placement="best")


def test_memory_limit_requires_an_example_and_reduces_activations():
    """Regression: `memory_bytes` was silently ignored."""
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]

    def table(world, **more):
        settings = {"schedule": "auto", "schedule_options": {"trials": 2}, "recompute": "never"}
        pipe = Pipeline(
            layers, nn.functional.mse_loss, microbatches=8, world=world, **settings, **more
        )
        return pipe.schedule

    def peak_microbatches(tables):
        return [peak_activations(row).size for row in tables[0].ranks]

    with pytest.raises(ConfigError, match=r"memory_bytes: .* pass example=\(inputs, targets\)"):
        run_on_threads(2, lambda world: table(world, memory_bytes=1e9))
    example = (INPUTS[:1], INPUTS[:1])
    ample, tight = (
        run_on_threads(
            2, lambda world, limit=limit: table(world, memory_bytes=limit, example=example)
        )
        for limit in (1e9, 1.0)
    )
    # The last rank needs the most memory, so it keeps one micro-batch at a time.
    assert min(peak_microbatches(tight)) == 1
    assert sum(peak_microbatches(tight)) < sum(peak_microbatches(ample))
