"""Tests of splitting transformers models into layers, and of models that cannot be split."""

import math
import pickle
from typing import Any

import pytest
import torch

from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import build_layer, run_layers
from gpipe_hpc.models.huggingface import huggingface_layers


def built(layers: Any) -> dict[int, torch.nn.Module]:
    return {i: build_layer(layer, index=i, seed=0) for i, layer in enumerate(layers)}


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "vit"])
def test_parameters_keep_their_names_each_in_one_layer(family: str, configs: Any, plain_model: Any):
    layers = huggingface_layers(configs[family])
    modules = built(layers)
    assert len(layers) == 6  # embedding, three blocks, norm, head
    names = [name for module in modules.values() for name in module.state_dict()]
    assert sorted(names) == sorted(plain_model(family).state_dict())
    assert all(m.training for module in modules.values() for m in module.modules())


def test_embedding_and_head_are_tied_as_the_config_says(configs: Any):
    tied = {"transformer.wte.weight": "transformer.wte.weight"}
    layers = huggingface_layers(configs["gpt2"])
    assert [dict(layer.ties) for layer in (layers[0], layers[-1])] == [
        tied,
        {"lm_head.weight": "transformer.wte.weight"},
    ]
    assert not any(layer.ties for layer in layers[1:-1])
    apart = huggingface_layers(configs["gpt2"] | {"tie_word_embeddings": False})
    assert not any(layer.ties for layer in apart)


def test_weights_start_as_transformers_starts_them(library: Any, configs: Any):
    """Standard deviations agree; GPT-2 scales the projections into the residual by depth."""
    config = configs["gpt2"] | {"n_embd": 64}
    layers = huggingface_layers(config)
    plain = library.AutoModelForCausalLM.from_config(library.GPT2Config(**config)).state_dict()
    ours = {name: t for module in built(layers).values() for name, t in module.state_dict().items()}
    spreads = {name: tensor.std().item() for name, tensor in ours.items()}
    for name, tensor in plain.items():
        expected = pytest.approx(tensor.std().item(), rel=0.15)
        assert spreads[name] == expected, name
    scaled = spreads["transformer.h.1.mlp.c_proj.weight"]
    if not library.__version__.startswith(("5.5.", "5.12.")):  # these versions do not scale
        assert scaled == pytest.approx(0.02 / math.sqrt(6), rel=0.15)
    again = build_layer(layers[1], index=1, seed=0).state_dict()
    assert all(torch.equal(again[name], ours[name]) for name in again)
    other = ours["transformer.h.1.mlp.c_fc.weight"]
    assert not torch.equal(ours["transformer.h.0.mlp.c_fc.weight"], other)


def test_blocks_alike_are_equal_specs(configs: Any):
    alike = huggingface_layers(configs["llama"] | {"num_hidden_layers": 4})
    assert alike[1] == alike[2] == alike[3]
    assert alike[3] != alike[4]  # the last block returns only hidden states
    kinds = huggingface_layers(configs["gemma3_text"])
    assert kinds[1] != kinds[2]


def test_layers_survive_pickling(configs: Any, batch_of: Any):
    inputs, _ = batch_of("llama")
    layers = huggingface_layers(configs["llama"])
    copied = pickle.loads(pickle.dumps(layers))
    outputs = [run_layers(built(each), each, inputs) for each in (layers, copied)]
    assert torch.equal(*outputs)


def test_blocks_need_nothing_of_what_is_not_theirs(configs: Any, batch_of: Any):
    """The boundary contains each mask and angle once, and ends with the last block."""
    inputs, _ = batch_of("gemma3_text", masked=True)
    modules = built(huggingface_layers(configs["gemma3_text"]))
    boundary = modules[0](inputs)
    tensors = [value for value in boundary.values if isinstance(value, torch.Tensor)]
    assert len({id(tensor) for tensor in tensors}) == len(tensors)
    assert list(boundary.kinds) == [0, 1, 0]
    for index in (1, 2):
        boundary = modules[index](boundary)
    assert isinstance(modules[3](boundary), torch.Tensor)


def test_other_inputs_are_refused(configs: Any, batch_of: Any):
    tokens, labels = batch_of("gpt2")
    embedding = built(huggingface_layers(configs["gpt2"])[:1])[0]
    with pytest.raises(ModelError, match=r"input_ids.*labels"):
        embedding({"input_ids": tokens, "labels": labels})
    with pytest.raises(ModelError, match=r"input_ids.*got tuple"):
        embedding((tokens,))


REFUSED = {
    "encoder_decoder": ({"model_type": "bart"}, "bart is an encoder-decoder model.*causal"),
    "t5": ({"model_type": "t5"}, "t5 is an encoder-decoder model.*causal"),
    "no_blocks": ({"model_type": "resnet"}, "cannot be split into layers"),
    "unknown": ({"model_type": "nonesuch"}, "does not know the model_type.*'nonesuch'"),
    "other_task": (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "expected a causal language model",
    ),
    "more_outputs": ({"model_type": "llama", "output_attentions": True}, "output_attentions"),
    "impossible": (
        {"model_type": "llama", "num_hidden_layers": "many"},
        "rejects the config of a llama",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_of_another_form_are_refused(case: str, library: Any):
    config, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        huggingface_layers(config)


def test_bad_settings_are_refused(configs: Any):
    with pytest.raises(ConfigError, match=r"bad attention.*'flash'"):
        huggingface_layers(configs["llama"], attention="flash")
    with pytest.raises(ConfigError, match=r"bad dtype.*'int8'"):
        huggingface_layers(configs["llama"], dtype="int8")
    with pytest.raises(ConfigError, match=r"no model is given; set model\.path"):
        huggingface_layers(None)
    with pytest.raises(ModelError, match=r"got int; set model\.path"):
        huggingface_layers(5)
