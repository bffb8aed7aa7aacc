import pytest
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import LayerSpec, count_parameters, find_ties, layer_parameters


def shared() -> list[nn.Module]:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return [first, nn.ReLU(), second]


def test_shared_parameters_of_built_layers_are_a_tie():
    (tie,) = find_ties(shared())
    assert tie.name == "layers.0.weight"
    assert tie.places == ((0, "weight"), (2, "weight"))


def test_specs_are_tied_by_name_and_counted_once():
    layers = [
        LayerSpec(nn.Embedding, 7, 4).tied({"weight": "words"}),
        LayerSpec(nn.Linear, 4, 4),
        LayerSpec(nn.Linear, 4, 7, bias=False).tied({"weight": "words"}),
    ]
    (tie,) = find_ties(layers)
    assert tie.places == ((0, "weight"), (2, "weight"))
    assert layer_parameters(layers) == [28, 20, 0]
    assert count_parameters(layers) == 48


def test_a_module_twice_in_the_model_ties_all_its_parameters():
    linear = nn.Linear(2, 2)
    assert [tie.name for tie in find_ties([linear, linear])] == ["layers.0.bias", "layers.0.weight"]


def test_sharing_inside_a_layer_and_parameterless_repeats_are_no_ties():
    first = nn.Linear(3, 3)
    act = nn.ReLU()
    assert find_ties([nn.Sequential(first, first), act, LayerSpec(nn.Linear, 3, 3), act]) == []


def test_a_tie_with_one_place_is_refused():
    with pytest.raises(ModelError, match=r"layers\.0: tie 'words' has one place"):
        find_ties([LayerSpec(nn.Linear, 2, 2).tied({"weight": "words"})])


def test_ties_of_unequal_shape_or_unknown_name_are_refused():
    one = LayerSpec(nn.Linear, 2, 2).tied({"weight": "w"})
    with pytest.raises(ModelError, match=r"layers\.1: weight cannot be tied to layers\.0\.weight"):
        count_parameters([one, LayerSpec(nn.Linear, 2, 3).tied({"weight": "w"})])
    with pytest.raises(ModelError, match=r"no parameter 'scale' to tie, expected one of weight"):
        count_parameters([one, LayerSpec(nn.Linear, 2, 2).tied({"scale": "w"})])
