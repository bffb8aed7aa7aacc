import pickle

import pytest
import torch
from torch import nn

from gpipe_hpc.config import build_target
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import LayerSpec, build_gpt, build_layer, build_mlp, build_model, model_names


@pytest.mark.parametrize("name", model_names())
def test_every_model_is_a_list_of_picklable_specs(name: str):
    layers = build_model(name)
    assert all(isinstance(layer, LayerSpec) for layer in layers)
    assert pickle.loads(pickle.dumps(layers)) == layers


def test_overrides_replace_the_preset():
    layers = build_model("gpt", width=64, num_layers=1)
    assert len(layers) == 5
    assert layers[0].args == (256, 128, 64, 0.0)


def test_mlp_alternates_linears_and_activations():
    layers = build_mlp([4, 8, 2], activation="tanh")
    assert layers == [LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 8, 2)]
    model = nn.Sequential(*(build_layer(layer, index=i, seed=0) for i, layer in enumerate(layers)))
    assert model(torch.ones(3, 4)).shape == (3, 2)


def test_unknown_names_are_answered_with_the_known():
    with pytest.raises(ModelError, match=r"gpt2_xl_untied.*got 'gpt3'"):
        build_model("gpt3")
    with pytest.raises(ModelError, match=r"gpt: .*width.*got depth"):
        build_model("gpt", depth=3)
    with pytest.raises(ModelError, match=r"mlp: .*relu.*got 'sin'"):
        build_mlp([2, 2], activation="sin")
    with pytest.raises(ModelError, match=r"mlp: widths must be.*\[2\]"):
        build_mlp([2])


@pytest.mark.parametrize("path", ["gpipe_hpc.models.gpt", "gpipe_hpc.models.zoo.gpt"])
def test_settings_of_old_runs_still_name_a_model(path: str):
    """Models have moved to models/zoo; a config.yaml of an older run names the previous path."""
    sizes = {"vocab_size": 8, "block_size": 4, "width": 32, "num_heads": 2, "num_layers": 1}
    built = build_target("model", {"_target_": f"{path}.build_gpt", **sizes})
    assert built == build_gpt(**sizes)


def test_names_that_never_were_are_refused_still():
    with pytest.raises(ConfigError, match=r"No module named .gpipe_hpc\.models\.gtp"):
        build_target("model", {"_target_": "gpipe_hpc.models.gtp.build"})
