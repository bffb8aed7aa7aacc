import pickle
from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models import (
    LayerSpec,
    global_name,
    layer_name,
    named_layer_parameters,
    normalise_layers,
)


def test_spec_builds_what_it_describes():
    spec = LayerSpec(nn.Linear, 3, 5, bias=False)
    module = spec.build()
    assert isinstance(module, nn.Linear)
    assert module.weight.shape == (5, 3)
    assert module.bias is None
    assert repr(spec) == "LayerSpec(Linear, 3, 5, bias=False)"


def test_keyword_called_factory_reaches_the_factory():
    spec = LayerSpec(lambda factory: nn.Linear(factory, 1), factory=4)
    assert spec.build().weight.shape == (1, 4)


def test_spec_is_immutable_and_its_kwargs_are_a_copy():
    spec = LayerSpec(nn.Linear, 3, 5, bias=False)
    with pytest.raises(AttributeError):
        spec.args = (1, 2)
    spec.kwargs["bias"] = True
    assert spec.kwargs == {"bias": False}


def test_spec_survives_pickling():
    spec = LayerSpec(nn.Linear, 3, 5, bias=False)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.build().weight.shape == (5, 3)


def test_equality_compares_factory_and_arguments():
    assert LayerSpec(nn.Linear, 3, 5, bias=True) == LayerSpec(nn.Linear, 3, 5, bias=True)
    assert LayerSpec(nn.Linear, 3, 5) != LayerSpec(nn.Linear, 5, 3)
    assert LayerSpec(nn.Linear, 3, 5) != LayerSpec(nn.Bilinear, 3, 5)
    assert LayerSpec(nn.Dropout, 1) != LayerSpec(nn.Dropout, True)
    assert LayerSpec(nn.ReLU) != nn.ReLU()


def test_equality_takes_tensors_by_value():
    one = LayerSpec(nn.Identity, torch.ones(2), [torch.zeros(1)], scale={"a": torch.ones(2)})
    two = LayerSpec(nn.Identity, torch.ones(2), [torch.zeros(1)], scale={"a": torch.ones(2)})
    assert one == two
    assert hash(one) == hash(two)
    assert one != LayerSpec(nn.Identity, torch.ones(3), [torch.zeros(1)], scale={})
    assert LayerSpec(nn.Identity, torch.ones(2)) != LayerSpec(nn.Identity, torch.ones(2).double())


def test_names():
    assert layer_name(LayerSpec(nn.Linear, 3, 5)) == "Linear"
    assert layer_name(nn.ReLU()) == "ReLU"
    assert layer_name(LayerSpec(partial(nn.Linear, 3), 5)) == "Linear"


@pytest.mark.parametrize("factory", [None, 3, nn.Linear(2, 2)])
def test_spec_refuses_what_makes_no_layer(factory: object):
    with pytest.raises(ModelError, match=r"LayerSpec.*got (NoneType|int|Linear)"):
        LayerSpec(factory)


def test_normalise_accepts_sequences():
    act = nn.ReLU()
    spec = LayerSpec(nn.Linear, 2, 2)
    assert normalise_layers([act, spec]) == [act, spec]
    assert normalise_layers((spec,)) == [spec]
    linear = nn.Linear(2, 2)
    assert normalise_layers(nn.Sequential(linear, act, linear, act)) == [linear, act, linear, act]
    assert normalise_layers(nn.ModuleList([linear])) == [linear]


class Pretrained(nn.Module):
    """A module that appears to be defined by transformers."""

    __module__ = "transformers.models.gpt2.modeling_gpt2"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([], r"has no layers"),
        (nn.Sequential(), r"has no layers"),
        (nn.Linear(2, 2), r"one Linear; .*nn\.Sequential"),
        (Pretrained(), r"Pretrained of transformers .*model\.path="),
        ("gpt", r"not a sequence.*got str"),
        (iter([nn.ReLU()]), r"not a sequence"),
        ([nn.ReLU(), nn.ReLU], r"layers\.1: .*LayerSpec\(ReLU"),
        ([nn.functional.relu], r"layers\.0: .*callable relu"),
        ([nn.ReLU(), None], r"layers\.1: .*got NoneType"),
    ],
)
def test_normalise_refuses_and_says_why(model: object, message: str):
    with pytest.raises(ModelError, match=message):
        normalise_layers(model)


def test_global_names():
    assert global_name(4, "weight") == "layers.4.weight"
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in named_layer_parameters(7, layer)] == [
        "layers.7.0.weight",
        "layers.7.0.bias",
        "layers.7.1.weight",
        "layers.7.1.bias",
    ]
