"""Optimizers: which parameters decay, and ranks that have none."""

import copy

import pytest
import torch
from torch import nn

from gpipe_hpc import LAMB, LARS
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.optim.lr import set_lr
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.settings import (
    AdamWConfig,
    LAMBConfig,
    LARSConfig,
    OptimizerConfig,
    RMSPropConfig,
    SGDConfig,
)

CONFIGS = [
    AdamWConfig(lr=0.1, weight_decay=0.5),
    SGDConfig(lr=0.1, weight_decay=0.5, momentum=0.5, nesterov=True),
    RMSPropConfig(lr=0.1, weight_decay=0.5, momentum=0.5, centered=True),
]
KINDS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]
CASES = list(zip(CONFIGS, KINDS, strict=True))
IDS = ["adamw", "sgd", "rmsprop"]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


OWN = [(LARSConfig(weight_decay=0.5), LARS), (LAMBConfig(weight_decay=0.5), LAMB)]
ALL, ALL_IDS = CASES + OWN, [*IDS, "lars", "lamb"]


@pytest.mark.parametrize(("config", "kind"), ALL, ids=ALL_IDS)
def test_matrices_decay_and_nothing_else(model, config, kind):
    optimizer = build_optimizer(model.named_parameters(), config)
    assert isinstance(optimizer, kind)
    decay = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert decay == {
        "0.weight": 0.5,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.5,
        "2.bias": 0.0,
    }


@pytest.mark.parametrize(("config", "kind"), CASES, ids=IDS)
def test_steps_equal_those_of_torch(model, config, kind):
    model.double()
    twin = copy.deepcopy(model)
    keywords = {
        name: value
        for name, value in vars(config).items()
        if name not in ("weight_decay", "masters")
    }
    groups = [
        {
            "params": [each for each in twin.parameters() if (each.ndim >= 2) == matrices],
            "weight_decay": 0.5 if matrices else 0.0,
        }
        for matrices in (True, False)
    ]
    optimizers = [build_optimizer(model.named_parameters(), config), kind(groups, **keywords)]
    for _ in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.arange(5)).square().sum().backward()
            optimizer.step()
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, plain) or kind is torch.optim.AdamW
        torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-15)


def test_frozen_parameters_are_left_out(model):
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), CONFIGS[0])
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == ["1.bias", "1.weight", "2.bias", "2.weight"]


@pytest.mark.parametrize("config", [config for config, _ in ALL], ids=ALL_IDS)
def test_rank_without_parameters_has_the_same_face(config):
    optimizer = build_optimizer([], config)
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    set_lr(optimizer, 0.25)
    saved = optimizer.state_dict()
    fresh = build_optimizer([], config)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.25 and saved["state"] == {}


def test_unknown_kind_is_refused(model):
    with pytest.raises(
        ConfigError, match="unknown kind OptimizerConfig, not one of conf/optimizer"
    ):
        build_optimizer(model.named_parameters(), OptimizerConfig())
