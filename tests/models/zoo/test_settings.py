"""Tests of the model presets: each gives the named model, and trains on suitable data."""

import pytest
from omegaconf import OmegaConf

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.config import build_target, check_config, compose_config, conf_dir
from gpipe_hpc.data import open_data
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import build_model, find_skips, loss_function
from gpipe_hpc.optim.optimizer import build_optimizer
from gpipe_hpc.settings import Config

IMAGES = ("data=synthetic_images",)
SMALL_IMAGES = ("data.height=64", "data.width=63", "data.num_classes=5")
EVEN_IMAGES = ("data.height=64", "data.width=64", "data.num_classes=5")
TOKENS = ("data=synthetic", "data.seq_len=8", "data.vocab_size=11")
SMALL_TOKENS = (
    *("model.vocab_size=11", "model.block_size=8", "model.num_layers=1", "model.num_heads=2"),
    "model.width=8",
)
MASKS = ("data=synthetic_masks",)
SMALL_UNET = ("model.num_convs=1", "model.base_channels=2")
VGG = (IMAGES, (*SMALL_IMAGES, "model.width=2", "model.hidden=8"))
AMOEBANET = (IMAGES, (*EVEN_IMAGES, "model.num_layers=3", "model.num_filters=8"))
RESNET = (IMAGES, (*SMALL_IMAGES, "model.num_blocks=[1,1]", "model.width=2"))
RESNET_V2 = (IMAGES, (*SMALL_IMAGES, "model.depth=11", "model.width=2"))
GPT2_SIZES = ("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl")
GPT2 = (*GPT2_SIZES, *(f"{name}_untied" for name in GPT2_SIZES), "gpt2_64")
# For each preset: settings for suitable data, and settings that make the model small.
ZOO = {
    "alexnet": VGG,
    "amoebanet_d": AMOEBANET,
    "amoebanet_d_tiny": AMOEBANET,
    "bert48": (TOKENS, SMALL_TOKENS),
    "googlenet": (IMAGES, (*SMALL_IMAGES, "model.width=8")),
    "gpt": (TOKENS, SMALL_TOKENS),
    **dict.fromkeys(GPT2, (TOKENS, SMALL_TOKENS)),
    "mlp": (("data=synthetic_vectors",), ("model.widths=[64,6,10]",)),
    **dict.fromkeys(("resnet50", "resnet101", "resnet152", "resnet_small"), RESNET),
    **dict.fromkeys(("resnet110_v2", "resnet1001_v2"), RESNET_V2),
    "transformer_l": (TOKENS, (*SMALL_TOKENS, "model.hidden=8")),
    "unet": (MASKS, SMALL_UNET),
    "unet_tiny": (MASKS, (*SMALL_UNET, "data.height=9", "data.width=12")),
    "vgg16": VGG,
    "vgg19": VGG,
}
# Presets that the fast tests train; the others are marked product.
QUICK = ("bert48", "mlp", "resnet_small", "unet_tiny")
# Presets that are not models of the zoo.
FOREIGN = {"huggingface", "own"}


def names(group: str) -> set[str]:
    return {path.stem for path in (conf_dir() / group).glob("*.yaml")}


def test_all_models_are_here():
    assert names("model") == ZOO.keys() | FOREIGN


@pytest.mark.parametrize("name", ZOO)
def test_yaml_is_the_named_model(name: str):
    """Only dropout and sizes that depend on the data may differ."""
    data, _ = ZOO[name]
    config = compose_config([f"model={name}", *data])
    written = OmegaConf.to_container(OmegaConf.load(conf_dir() / "model" / f"{name}.yaml"))
    free = [k for k, value in written.items() if k == "dropout" or "${data." in str(value)]
    named = build_model(name, **{key: config.model[key] for key in free})
    described = build_target("model", config.model)
    assert described == named
    assert find_skips(described) == find_skips(named)


def losses_of_two_steps(config: Config) -> list[float]:
    """Train two steps on four samples, partitioned by time, on two ranks that are threads."""
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
        optimizer = build_optimizer(pipe.named_parameters(), config.optimizer)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(inputs, targets).loss)
            optimizer.step()
        return losses

    first, second = run_on_threads(2, body)
    assert first == second
    return first


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.product]) for name in ZOO],
)
def test_small_one_trains_two_steps(name: str):
    data, small = ZOO[name]
    settings = [f"model={name}", *data, *small, "data.seed=1", "optimizer.lr=0.01"]
    first, second = losses_of_two_steps(compose_config(settings))
    assert 0 < second != first > 0


@pytest.mark.parametrize("name", sorted(names("optimizer")))
def test_every_optimizer_trains_two_steps(name: str):
    data, small = ZOO["mlp"]
    config = compose_config([f"optimizer={name}", "model=mlp", *data, *small])
    first, second = losses_of_two_steps(config)
    assert 0 < second < first


@pytest.mark.parametrize("setting", ["channels=0", "height=0", "width=0", "num_classes=1"])
def test_impossible_images_are_refused(setting: str):
    config = compose_config(["model=vgg16", *IMAGES, f"data.{setting}"])
    with pytest.raises(ConfigError, match=rf"bad data\.{setting.split('=')[0]}, expected at least"):
        check_config(config, 1)


def test_image_model_without_images_says_which_data():
    with pytest.raises(ConfigError, match=r"data\.num_classes.*data=synthetic_images"):
        compose_config(["model=vgg16"])
