"""Memory by rank: `recompute=budget`, `auto` and the search of stages heed each rank's own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import ConfigError, PartitionError
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.planner import CountedCosts, Example, Request, fit_stages, lay_out
from gpipe_hpc.planner.memory.by_rank import excess_bytes, memory_limits
from gpipe_hpc.planner.report.alternatives import forecast_of
from gpipe_hpc.schedule import Op
from tests.support import mean_square

LAYERS = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
ASKED = Request(stages=2, microbatches=8, partition=[6, 6], schedule="one_f_one_b")


def cost_model():
    batch = torch.empty(256, 64, device="meta")
    example = Example(batch, batch, mean_square, 0, planned_device("cpu"))
    return CountedCosts(normalise_layers(LAYERS), example)


def held(request):
    found = lay_out(request, cost_model())
    return found, [r.total_bytes for r in forecast_of(found, request, cost_model(), 8 * 256).ranks]


def recomputing(layout):
    rows = enumerate(layout.schedule.ranks)
    return {rank for rank, row in rows if any(action.op is Op.R for action in row)}


def test_a_list_is_of_one_pipeline_or_of_all_ranks():
    """Of replicas the one with the least memory counts, as all have the same layout."""
    asked = replace(ASKED, replicas=2)
    assert memory_limits(asked) is None
    assert memory_limits(replace(asked, memory_bytes=7)) == (7, 7)
    assert memory_limits(replace(asked, memory_bytes=[5, 6])) == (5, 6)
    assert memory_limits(replace(asked, memory_bytes=[5, 6, 7, 4])) == (5, 4)
    for wrong in ([5], [5, 6, 7], [5, 0], [5, float("inf")], [5, True]):
        with pytest.raises(
            ConfigError, match="each of the 2 ranks of a pipeline, or for each of all"
        ):
            memory_limits(replace(asked, memory_bytes=wrong))
    assert excess_bytes([3, 9], [4, 5]) == 4 and excess_bytes([3, 9], None) == 0


@pytest.mark.parametrize("small", [0, 1])
def test_a_budget_recomputes_on_the_rank_that_lacks_memory_alone(small):
    """The last rank of 1F1B keeps one micro-batch, whatever it recomputes: it has no R."""
    _, most = held(replace(ASKED, recompute="never"))
    _, least = held(replace(ASKED, recompute="except_last"))
    limits = [2 * each for each in most]
    limits[small] = (most[small] + least[small]) // 2
    found, needed = held(replace(ASKED, recompute="budget", memory_bytes=limits))
    assert recomputing(found) == ({small} if small == 0 else set())
    assert excess_bytes(needed, limits) == 0
    limits[small] = 1000
    with pytest.raises(PartitionError, match=rf"1\.00 kB to .* a rank by [^,]* on rank {small}"):
        held(replace(ASKED, recompute="budget", memory_bytes=limits))


@pytest.mark.parametrize(("recompute", "small"), [("never", 1), ("except_last", 0), ("budget", 2)])
def test_auto_searches_an_order_that_keeps_less_on_the_small_rank_alone(recompute, small):
    """One number for all would make every rank as careful as the smallest."""
    asked = replace(
        ASKED,
        stages=3,
        microbatches=4,
        partition=[4, 4, 4],
        recompute=recompute,
        schedule="auto",
        schedule_options={"trials": 2},
    )
    named = replace(asked, schedule="one_f_one_b", schedule_options={})
    _, free = held(replace(named, schedule="gpipe", recompute="never"))
    _, tight = held(replace(named, recompute="always"))
    limits = [2 * most for most in free]
    limits[small] = tight[small] + (free[small] - tight[small]) // 3
    found, needed = held(replace(asked, memory_bytes=limits))
    assert excess_bytes(needed, limits) == 0
    if recompute == "budget":
        assert recomputing(found) <= {small}


def test_stages_are_chosen_that_each_rank_has_room_for():
    """With one number a rank too small for the model alone made all ranks too small for it."""
    asked = Request(stages="fit", microbatches=12, partition="time", schedule="zb_h1")
    one = replace(ASKED, schedule="zb_h1", microbatches=12)
    (whole,) = held(replace(one, stages=1, partition=[12], microbatches=6))[1]
    between = (max(held(one)[1]) + whole) / 2
    ample = fit_stages(replace(asked, memory_bytes=[whole * 2] * 2), 2, cost_model())
    assert ample.stages == 1
    found = fit_stages(replace(asked, memory_bytes=[whole * 2, between]), 2, cost_model())
    assert found.stages == 2 and "(with 1 a rank needs more than " in found.text
