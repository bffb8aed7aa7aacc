"""Micro-batches too small for BatchNorm are refused from shapes alone."""

import pytest
import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.planner.batchnorm import check_batchnorm
from tests.support import refusal

FLAT = [
    LayerSpec(nn.Conv2d, 3, 4, 3),
    LayerSpec(nn.BatchNorm2d, 4),
    nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5)),
]


def images(samples):
    return lambda: torch.zeros(samples, 3, 4, 4)


def test_two_values_are_enough():
    assert refusal(check_batchnorm, FLAT, images(2)) is None


def test_one_is_not_and_the_layer_is_named():
    name = r"layers\.2\.2 \(BatchNorm1d\): .* a micro-batch of shape \(1, 5\); use"
    with pytest.raises(ModelError, match=name):
        check_batchnorm(FLAT, images(1))
    assert type(FLAT[2][2]) is nn.BatchNorm1d  # the user's own is not touched


def test_one_sample_of_several_pixels_is_enough():
    assert refusal(check_batchnorm, FLAT[:2], images(1)) is None


def test_a_frozen_layer_needs_none():
    layers = [FLAT[0], FLAT[1], nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16).eval())]
    assert refusal(check_batchnorm, layers, images(1)) is None


def test_without_batchnorm_nothing_is_read():
    check_batchnorm([LayerSpec(nn.Linear, 2, 2)], lambda: pytest.fail("read"))


class Reads(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


def test_what_cannot_run_without_values_is_passed_over():
    layers = [Reads(), nn.BatchNorm1d(5)]
    assert refusal(check_batchnorm, layers, lambda: torch.zeros(1, 5)) is None
