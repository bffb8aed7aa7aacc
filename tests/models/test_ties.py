import pytest
import torch
from torch import Tensor, nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    LayerSpec,
    build_layer,
    count_parameters,
    find_ties,
    layer_parameters,
    mean_squared_error,
)


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
    with pytest.raises(ModelError, match=r"layers\.0: the tie 'words'"):
        find_ties([LayerSpec(nn.Linear, 2, 2).tied({"weight": "words"})])


def test_ties_of_unequal_shape_or_unknown_name_are_refused():
    one = LayerSpec(nn.Linear, 2, 2).tied({"weight": "w"})
    with pytest.raises(ModelError, match=r"layers\.1: weight .*layers\.0\.weight"):
        count_parameters([one, LayerSpec(nn.Linear, 2, 3).tied({"weight": "w"})])
    with pytest.raises(ModelError, match=r"'scale' .*expected one of weight"):
        count_parameters([one, LayerSpec(nn.Linear, 2, 2).tied({"scale": "w"})])


class Twice(nn.Module):
    """A layer in which two modules share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize("names", [("a.weight",), ("b.weight",), ("a.weight", "b.weight")])
@pytest.mark.parametrize("alias_first", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_any_name_of_a_parameter_ties_all_of_them(names, alias_first, stages):
    """Regression: a parameter tied by its second name was missing, and one by its first untied."""
    twice = LayerSpec(Twice).tied(dict.fromkeys(names, "w"))
    layers = [twice, LayerSpec(nn.Linear, 3, 3).tied({"weight": "w"})]
    layers = layers if alias_first else layers[::-1]
    (tie,) = find_ties(layers)
    assert sorted(name for _, name in tie.places) == ["a.weight", "weight"]
    assert count_parameters(layers) == 9 + 3 + 3
    inputs, targets = torch.ones(4, 3), torch.zeros(4, 3)

    def body(world):
        pipe = Pipeline(layers, mean_squared_error, world=world, seed=1)
        loss = pipe.step(inputs, targets).loss
        return float(loss), {name: p.grad for name, p in pipe.named_parameters()}

    found = run_on_threads(stages, body)
    plain = nn.Sequential(*(build_layer(x, index=i, seed=1) for i, x in enumerate(layers)))
    linear, both = plain if not alias_first else plain[::-1]
    if alias_first:
        linear.weight = both.a.weight
    else:
        both.a.weight = both.b.weight = linear.weight
    loss = (plain(inputs) - targets).square().mean()
    loss.backward()
    assert all(each == pytest.approx(loss.item(), rel=1e-6) for each, _ in found)
    for gradients in (part[tie.name] for _, part in found if tie.name in part):
        torch.testing.assert_close(gradients, linear.weight.grad)


def test_one_parameter_in_two_ties_is_refused_by_its_names():
    layers = [
        LayerSpec(Twice).tied({"a.weight": "v", "b.weight": "w"}),
        LayerSpec(nn.Linear, 3, 3).tied({"weight": "v"}),
        LayerSpec(nn.Linear, 3, 3).tied({"weight": "w"}),
    ]
    with pytest.raises(
        ModelError,
        match=r"layers\.0: a\.weight .*'v'.* b\.weight.*'w'",
    ):
        find_ties(layers)
