"""pipeline.stages=fit: the fastest layout that fits into memory, on whatever ranks come."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpipe_hpc.device.device import planned_device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.planner import CountedCosts, Example, Request, fit_stages, lay_out
from tests.support import mean_square

LAYERS = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]


def cost_model():
    batch = torch.empty(4, 64, device="meta")
    example = Example(batch, batch, mean_square, 0, planned_device("cpu"))
    return CountedCosts(normalise_layers(LAYERS), example)


def fit(ranks, **settings):
    asked = {"stages": "fit", "microbatches": 12, "partition": "time", "schedule": "zb_h1"}
    return fit_stages(Request(**{**asked, **settings}), ranks, cost_model())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8])
def test_whatever_ranks_come_the_micro_batches_are_the_same(ranks):
    found = fit(ranks, replicas=2, microbatches=6).request
    assert found.stages * found.replicas == ranks
    assert found.replicas * found.microbatches == 12
    assert lay_out(found, cost_model()).schedule.num_ranks == found.stages


def test_with_room_for_all_the_fastest_is_taken():
    """Alone on each rank nothing waits, as 12 micro-batches divide evenly over three."""
    found = fit(3)
    assert (found.request.stages, found.request.replicas) == (1, 3)
    assert "1 stage on 3 ranks (3 replicas), the fastest of 1, 2, 3 in simulation" in found.text


def test_where_one_rank_has_no_room_the_model_is_cut_so_that_it_fits():
    """And the line says which numbers of stages need too much; the choice is one of 7 ranks."""
    assert "a rank needs more" not in fit(7, memory_bytes=1e12).text
    found = fit(7, memory_bytes=250e3)
    assert "a rank needs more than 250 kB" in found.text
    assert "(with 1" in found.text and "pipelines with holes" in found.text
    assert found.request.stages == 7 and found.request.schedule == "rerouted"
    assert 1 < found.request.options["stages"] < 7
    least = fit(7, memory_bytes=10)
    assert "none of 1, 2, 3, 4, 5, 6, 7 fits in 10 B; this one needs the least memory" in least.text


def test_a_schedule_without_holes_takes_whole_replicas():
    found = fit(4, schedule="zb_v").request
    assert found.schedule == "zb_v" and found.stages * found.replicas == 4
    with pytest.raises(
        ConfigError, match="no number of stages works for 13 ranks with these settings"
    ):
        fit(13, schedule="zb_v", microbatches=7)


def test_what_tells_the_stages_already_is_refused():
    with pytest.raises(ConfigError, match=r"for 2 stages; set pipeline\.stages"):
        fit(3, partition=[6, 6])
    for name in ("paces", "memory_bytes"):
        with pytest.raises(ConfigError, match=rf"pipeline\.{name}: .* each of the 3 ranks"):
            fit(3, **{name: [1e9, 1e9]})
    table = lay_out(Request(stages=2, microbatches=4), cost_model()).schedule
    with pytest.raises(ConfigError, match="a schedule table of your own; set it to 2"):
        fit_stages(replace(Request(stages="fit"), schedule=table), 2, cost_model())


def test_without_figures_the_layers_weigh_as_the_cut_says():
    layers = CountedCosts(normalise_layers(LAYERS), None)
    asked = Request(stages="fit", microbatches=12, partition="parameters", schedule="gpipe")
    found = fit_stages(asked, 3, layers).request
    assert (found.stages, found.replicas, found.microbatches) == (1, 3, 4)
