"""The settings of the zoo: each YAML gives the named model, and trains on the data made for it."""

import pytest
import torch

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.config import build_target, check_config, compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import build_model, loss_function
from gpipe_hpc.training.data import open_data

IMAGES = ("data=synthetic_images",)
SMALL_IMAGES = ("data.height=64", "data.width=63", "data.num_classes=5", "model.width=2")
TOKENS = ("data=synthetic", "data.seq_len=8", "data.vocab_size=11")
SMALL_TOKENS = (
    *("model.vocab_size=11", "model.block_size=8", "model.num_layers=1", "model.num_heads=2"),
    "model.width=8",
)
ZOO = {
    "alexnet": (IMAGES, (*SMALL_IMAGES, "model.hidden=8")),
    "bert48": (TOKENS, SMALL_TOKENS),
    "gpt2_64": (TOKENS, SMALL_TOKENS),
    "transformer_l": (TOKENS, (*SMALL_TOKENS, "model.hidden=8")),
    "vgg16": (IMAGES, (*SMALL_IMAGES, "model.hidden=8")),
    "vgg19": (IMAGES, (*SMALL_IMAGES, "model.hidden=8")),
}


@pytest.mark.parametrize("name", ZOO)
def test_yaml_is_the_named_model(name: str):
    data, _ = ZOO[name]
    config = compose_config([f"model={name}", *data])
    named = build_model(name, dropout=config.model["dropout"])
    assert build_target("model", config.model) == named


@pytest.mark.parametrize("name", ZOO)
def test_small_one_trains_two_steps(name: str):
    data, small = ZOO[name]
    config = compose_config([f"model={name}", *data, *small, "data.seed=1"])
    check_config(config, 2)
    source = open_data(config.data)
    inputs, targets = source.train.read_inputs(range(4)), source.train.read_targets(range(4))

    def body(world):
        pipe = Pipeline(
            build_target("model", config.model),
            loss_function(source.loss),
            microbatches=2,
            partition="time",
            example=(inputs[:2], targets[:2]),
            world=world,
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(inputs, targets).loss)
            optimizer.step()
        return losses

    first, second = run_on_threads(2, body)
    assert first == second
    assert 0 < first[1] != first[0] > 0


@pytest.mark.parametrize("setting", ["channels=0", "height=0", "width=0", "num_classes=1"])
def test_impossible_images_are_refused(setting: str):
    config = compose_config(["model=vgg16", *IMAGES, f"data.{setting}"])
    with pytest.raises(ConfigError, match=rf"bad data\.{setting.split('=')[0]}, expected at least"):
        check_config(config, 1)


def test_image_model_without_images_says_which_data():
    with pytest.raises(ConfigError, match=r"data\.num_classes.*vgg16 with data=synthetic_images"):
        compose_config(["model=vgg16"])
