"""The learning rate as a function of the step."""

import pytest
import torch

from gpipe_hpc.optim.lr import lr_at, set_lr
from gpipe_hpc.settings import Config, OptimizerConfig, TrainConfig
from gpipe_hpc.settings.training import LrConfig


def config(steps=110, warmup_steps=10, decay="cosine", min_ratio=0.1, lr=2.0) -> Config:
    return Config(
        optimizer=OptimizerConfig(lr=lr),
        lr=LrConfig(warmup_steps, decay, min_ratio),
        train=TrainConfig(steps=steps),
    )


def test_rises_linearly_to_the_peak():
    rates = [lr_at(step, config()) for step in range(10)]
    assert rates == pytest.approx([0.2 * (step + 1) for step in range(10)])


def test_falls_by_half_a_cosine():
    rates = [lr_at(step, config()) for step in (10, 35, 60, 85, 110)]
    # 0.2 + 1.8 x (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4, 1
    assert rates == pytest.approx([2.0, 1.7363961, 1.1, 0.4636039, 0.2])


def test_stays_low_past_the_end():
    assert lr_at(500, config()) == pytest.approx(0.2)


def test_constant_after_the_warmup():
    rates = [lr_at(step, config(decay="constant")) for step in (4, 10, 60, 500)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0])


def test_no_warmup_starts_at_the_peak():
    assert lr_at(0, config(warmup_steps=0)) == 2.0


@pytest.mark.parametrize("steps", [0, 5, 10])
def test_warmup_longer_than_the_run_only_rises(steps):
    rates = [lr_at(step, config(steps=steps)) for step in range(steps + 1)]
    assert rates == sorted(rates) and rates[-1] <= 2.0


def scaled(batch_size, scaling="linear", **more) -> Config:
    return Config(
        optimizer=OptimizerConfig(lr=0.1),
        lr=LrConfig(
            **{"warmup_steps": 0} | more, decay="constant", base_batch_size=32, scaling=scaling
        ),
        train=TrainConfig(batch_size=batch_size),
    )


def test_grows_with_the_batch():
    assert lr_at(0, scaled(256)) == pytest.approx(0.8)
    assert lr_at(0, scaled(8)) == pytest.approx(0.025)
    assert lr_at(0, scaled(512, "sqrt")) == pytest.approx(0.4)
    assert lr_at(0, scaled(256, "adascale")) == 0.1  # its gain comes on top


def test_warms_up_from_the_rate_of_the_base_batch():
    """Goyal et al. 2017, section 2.2: from lr to k lr by the same amount a step."""
    config = scaled(256, warmup_steps=7, start_ratio=1.0)
    rates = [lr_at(step, config) for step in range(9)]
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8])
    from_nothing = [lr_at(step, scaled(256, warmup_steps=2)) for step in range(3)]
    assert from_nothing == pytest.approx([0.4, 0.8, 0.8])


def test_all_groups_get_the_rate():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters], lr=1.0)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
