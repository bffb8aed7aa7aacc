import pytest
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    LayerSpec,
    global_name,
    named_layer_parameters,
    refuse_shared_parameters,
    shared_parameters,
)


def test_global_names():
    assert global_name(4, "weight") == "layers.4.weight"
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in named_layer_parameters(7, layer)] == [
        "layers.7.0.weight",
        "layers.7.0.bias",
        "layers.7.1.weight",
        "layers.7.1.bias",
    ]


def tied() -> list[nn.Module]:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return [first, nn.ReLU(), second]


def test_sharing_is_found_and_refused():
    layers = tied()
    assert shared_parameters(layers) == [("layers.0.weight", "layers.2.weight")]
    with pytest.raises(ModelError, match=r"layers\.0\.weight = layers\.2\.weight; give each"):
        refuse_shared_parameters(layers)


def test_sharing_is_found_among_a_ranks_own_layers():
    layers = tied()
    assert shared_parameters([(5, layers[0]), (8, layers[2])]) == [
        ("layers.5.weight", "layers.8.weight")
    ]


def test_a_module_twice_in_the_model_shares_all_its_parameters():
    linear = nn.Linear(2, 2)
    assert len(shared_parameters([linear, linear])) == 2


def test_sharing_inside_a_layer_and_parameterless_repeats_are_fine():
    first = nn.Linear(3, 3)
    inside = nn.Sequential(first, first)
    act = nn.ReLU()
    refuse_shared_parameters([inside, act, LayerSpec(nn.Linear, 3, 3), act])
