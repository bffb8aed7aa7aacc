import pytest
import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import LayerSpec, count_parameters, layer_parameters, parameter_sizes


def test_counts_per_layer_without_buffers():
    layers = [
        LayerSpec(nn.Conv2d, 3, 8, 3),
        LayerSpec(nn.BatchNorm2d, 8),
        nn.ReLU(),
        nn.Linear(8, 2),
    ]
    assert layer_parameters(layers) == [3 * 8 * 9 + 8, 16, 0, 18]
    assert count_parameters(layers) == 3 * 8 * 9 + 8 + 16 + 18


def test_a_model_no_machine_holds_is_counted():
    assert count_parameters([LayerSpec(nn.Linear, 10**6, 10**6)] * 50) == 50 * (10**12 + 10**6)


def test_tied_built_parameters_count_once_for_the_first_layer():
    first, second = nn.Linear(3, 4), nn.Linear(3, 4)
    second.weight = first.weight
    assert layer_parameters([first, second, second]) == [16, 4, 0]


def test_sizes_by_global_name():
    assert parameter_sizes([nn.ReLU(), LayerSpec(nn.Linear, 3, 4), nn.BatchNorm1d(4)]) == {
        "layers.1.weight": 12,
        "layers.1.bias": 4,
        "layers.2.weight": 4,
        "layers.2.bias": 4,
    }


def test_tied_inside_a_spec_count_once():
    def twice() -> nn.Module:
        linear = nn.Linear(3, 3)
        return nn.Sequential(linear, linear)

    assert layer_parameters([LayerSpec(twice), LayerSpec(twice)]) == [12, 12]


def test_frozen_parameters_count():
    assert count_parameters([nn.Linear(3, 3).requires_grad_(False)]) == 12


def test_factories_that_read_values_are_built_for_real():
    def by_value() -> nn.Module:
        return nn.Dropout(torch.linspace(0, 0.5, 3)[1].item())

    assert layer_parameters([LayerSpec(by_value)]) == [0]


def test_random_state_is_left_alone():
    before = torch.get_rng_state()
    count_parameters([LayerSpec(nn.Linear, 3, 3)])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_true_fault_is_reported_once_with_its_layer():
    with pytest.raises(ModelError, match=r"^layers\.1: the factory Linear failed"):
        count_parameters([nn.ReLU(), LayerSpec(nn.Linear, 3)])


def test_a_built_layer_without_a_shape_is_named():
    """Regression: torch's error about uninitialized parameters named no layer."""
    with pytest.raises(ModelError, match=r"layers\.1: weight has no shape yet"):
        count_parameters([nn.Linear(2, 2), nn.LazyLinear(3)])
