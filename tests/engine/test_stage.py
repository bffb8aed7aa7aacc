"""Stages: names of parameters, random keys, and inputs that are never modified."""

import pytest
import torch
from torch import nn

from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.engine.layer_runner import RunMode
from gpipe_hpc.engine.run import Outcome, Run
from gpipe_hpc.engine.stage import Stage, evaluation_mode
from gpipe_hpc.engine.stage_runner import ForwardPlan, StageRunner
from gpipe_hpc.engine.wiring import StageRoutes
from gpipe_hpc.errors import ModelError

CPU = HostDevice()
MIDDLE = StageRoutes({-1: ()}, {1: ()})


class Apply(nn.Module):
    """Turn a function into a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, nest):
        return self.function(nest)


def stage_of(*layers, first=0):
    return Stage(0, {first + i: layer for i, layer in enumerate(layers)}, CPU, MIDDLE)


def run(stage, boundary, key):
    """Run all layers; return their output."""
    made = StageRunner(stage).forward(
        Run("test", lambda microbatch: key, 1),
        0,
        [boundary],
        1,
        ForwardPlan(RunMode.EVALUATE),
        Outcome(),
    )
    return made[0]


def no_key(layer):
    return 0


def test_in_place_layer_does_not_modify_stage_input():
    stage = stage_of(nn.ReLU(inplace=True))
    for _ in range(3):
        boundary = torch.tensor([-1.0, 2.0])
        assert run(stage, boundary, no_key).tolist() == [0.0, 2.0]
        assert boundary.tolist() == [-1.0, 2.0]


def test_in_place_layer_accepts_leaf_that_requires_grad():
    stage = stage_of(nn.ReLU(inplace=True))
    for _ in range(2):
        boundary = torch.tensor([-1.0, 2.0], requires_grad=True)
        work = StageRunner(stage)
        work.forward(
            Run("test", lambda microbatch: no_key, 1),
            0,
            [boundary],
            2,
            ForwardPlan(RunMode.TRAIN),
            Outcome(),
        )
        work.backward(0, [torch.ones(2)])
        assert boundary.grad.tolist() == [0.0, 1.0]


def test_layer_may_modify_its_input_dict():
    """Regression: the dict was not copied, so recomputation started from the modified one."""

    def double(nest):
        nest["x"] = nest["x"] * 2
        nest["more"] = True
        return nest

    stage = stage_of(Apply(double))
    for _ in range(3):
        boundary = {"x": torch.ones(2)}
        assert run(stage, boundary, no_key)["x"].tolist() == [2.0, 2.0]
        assert boundary.keys() == {"x"} and boundary["x"].tolist() == [1.0, 1.0]


def test_stage_input_is_copied_in_first_run_only():
    """The first run shows whether layers write in place."""
    seen = []
    stage = stage_of(Apply(lambda x: seen.append(x) or x + 1))
    boundary = torch.ones(2)
    for _ in range(3):
        run(stage, boundary, no_key)
    assert [x is boundary for x in seen] == [False, True, True]


def test_layer_that_writes_in_place_only_later_is_refused():
    stage = stage_of(Apply(lambda x: x.add_(1) if x[0] > 0 else x + 1), first=4)
    run(stage, torch.tensor([-1.0]), no_key)
    with pytest.raises(ModelError, match=r"layers 4 to 4.*wrote in place.*inplace=False"):
        run(stage, torch.tensor([1.0]), no_key)


def test_in_place_layer_in_training_is_detected_after_evaluation():
    """In-place dropout writes in training only, so an earlier evaluation proves nothing."""
    stage = stage_of(nn.Dropout(0.5, inplace=True))
    boundary = torch.ones(64)
    with evaluation_mode([stage]):
        run(stage, boundary, no_key)
    run(stage, boundary, no_key)
    assert boundary.tolist() == [1.0] * 64


def test_each_layer_draws_with_its_own_key():
    stage = stage_of(Apply(lambda x: x + torch.rand(())), Apply(lambda x: x + torch.rand(())))
    expected = 0.0
    for key in (100, 101):
        torch.manual_seed(key)
        expected += torch.rand(()).item()
    out = run(stage, torch.zeros((), dtype=torch.float64), lambda layer: 100 + layer)
    assert out.item() == pytest.approx(expected, abs=1e-7)


def test_names_are_global_and_shared_parameters_are_listed_once():
    inner = nn.Linear(2, 2)
    stage = stage_of(nn.Sequential(inner, nn.ReLU(), inner), nn.BatchNorm1d(2), first=5)
    assert list(stage.named_parameters()) == [
        "layers.5.0.weight",
        "layers.5.0.bias",
        "layers.6.weight",
        "layers.6.bias",
    ]
    assert "layers.6.running_mean" in stage.named_buffers()


def test_non_persistent_buffers_are_not_listed():
    layer = nn.Identity()
    layer.register_buffer("cache", torch.zeros(1), persistent=False)
    layer.register_buffer("kept", torch.zeros(1))
    assert list(stage_of(layer).named_buffers()) == ["layers.0.kept"]


def test_evaluation_mode_restores_training_flags():
    layers = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Dropout()), nn.Linear(1, 1)
    stage = stage_of(*layers)
    with pytest.raises(KeyError), evaluation_mode([stage]):
        assert not any(m.training for layer in layers for m in layer.modules())
        raise KeyError
    assert [m.training for layer in layers for m in layer.modules()] == [True, False, True, True]
