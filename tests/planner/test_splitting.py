"""What zb_h1 would bring to a run with holes is said beside who holds which stage."""

import logging
import re

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.planner import LayerTimes, Request, lay_out
from gpipe_hpc.planner.advice import KnownCosts
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.splitting import gain_of_splitting
from gpipe_hpc.schedule import simulate
from tests.support import mean_square

LAYERS = [LayerSpec(nn.Linear, 16, 16) for _ in range(14)]
COUNT = count_model(LAYERS, torch.empty(4, 16, device="meta"))


def asked(schedule, microbatches=8, **wishes):
    request = Request(partition="time", recompute="never", schedule=schedule, **wishes)
    return request.in_rows(7, 4, 2 * microbatches)


def cost_model_of(input_gradient=1.0, weight_gradient=1.0):
    backward = input_gradient + weight_gradient
    times = LayerTimes.alike(1.0, backward, input_gradient, weight_gradient)
    return KnownCosts(LAYERS, (times,) * len(LAYERS), COUNT)


def said(request, cost_model):
    return gain_of_splitting(request, lay_out(request, cost_model), cost_model)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_the_gain_is_that_of_the_table_that_would_run(schedule):
    cost_model = cost_model_of()
    took = [
        simulate(layout.schedule, layout.partition.stage_costs()).makespan
        for layout in (lay_out(asked(name), cost_model) for name in (schedule, "zb_h1"))
    ]
    text = said(asked(schedule), cost_model)
    (percent,) = re.fullmatch(
        r"with pipeline\.schedule=zb_h1 a step would be (\d+) % shorter \(simulated, .*\)", text
    ).groups()
    assert int(percent) == round(100 * (1 - took[1] / took[0])) > 3


def test_nothing_is_said_where_little_is_gained_or_it_cannot_be():
    cost_model = cost_model_of()
    assert said(asked("zb_h1"), cost_model) == ""
    assert said(asked("one_f_one_b", microbatches=200), cost_model) == ""
    assert said(asked("one_f_one_b", compile=True), cost_model) == ""
    whole = Request(stages=2, microbatches=8, partition="time", schedule="gpipe")
    assert said(whole, cost_model) == ""


def test_what_would_not_fit_is_not_told():
    cost_model = cost_model_of()
    assert said(asked("one_f_one_b", memory_bytes=1e9), cost_model)
    assert said(asked("one_f_one_b", memory_bytes=10.0), cost_model) == ""


def test_a_memory_without_an_example_starts_a_run_with_holes(caplog):
    """Layers that could not be counted ended a run for the sake of an advice."""
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]

    def body(world):
        pipe = Pipeline(
            layers, mean_square, stages=2, microbatches=2, memory_bytes=1e9, world=world
        )
        return pipe.layout.searched

    assert run_on_threads(3, body) == ["", "", ""]


@pytest.mark.parametrize(("schedule", "lines"), [("gpipe", 1), ("zb_h1", 0)])
def test_a_run_with_holes_says_it_at_its_start(caplog, schedule, lines):
    caplog.set_level(logging.INFO, logger="gpipe_hpc.pipeline")
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]

    def body(world):
        Pipeline(layers, mean_square, stages=2, microbatches=2, schedule=schedule, world=world)

    run_on_threads(3, body)
    texts = [each.getMessage() for each in caplog.records]
    assert any(text.startswith("3 ranks hold 2 stages") for text in texts)
    assert sum(text.startswith("with pipeline.schedule=zb_h1 a step") for text in texts) == lines
