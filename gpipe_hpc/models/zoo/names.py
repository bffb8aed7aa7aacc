"""Registry of the predefined models by name."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.layers import LayerSpec
from gpipe_hpc.models.zoo.alexnet import build_alexnet
from gpipe_hpc.models.zoo.amoebanet import build_amoebanet_d
from gpipe_hpc.models.zoo.bert import build_bert
from gpipe_hpc.models.zoo.googlenet import build_googlenet
from gpipe_hpc.models.zoo.gpt import build_gpt
from gpipe_hpc.models.zoo.mlp import build_mlp
from gpipe_hpc.models.zoo.resnet import build_resnet, build_small_resnet
from gpipe_hpc.models.zoo.resnet_v2 import build_resnet_v2
from gpipe_hpc.models.zoo.transformer import build_transformer
from gpipe_hpc.models.zoo.unet import build_unet
from gpipe_hpc.models.zoo.vgg import build_vgg


def _gpt2(name: str, **sizes: Any) -> dict[str, Callable[..., list[LayerSpec]]]:
    """Return builders, by name, of a published GPT-2 and of its variant with an untied head."""
    build = partial(build_gpt, vocab_size=50257, block_size=1024, **sizes)
    return {name: partial(build, tied=True), f"{name}_untied": build}


_MODELS: Final[Mapping[str, Callable[..., list[LayerSpec]]]] = MappingProxyType(
    {
        "alexnet": build_alexnet,
        "amoebanet_d": build_amoebanet_d,
        "amoebanet_d_tiny": partial(build_amoebanet_d, num_layers=3, num_filters=16),
        "bert48": partial(
            build_bert, vocab_size=30522, block_size=512, num_layers=48, num_heads=16, width=1024
        ),
        "gpt": partial(
            build_gpt, vocab_size=256, block_size=128, num_layers=4, num_heads=4, width=128
        ),
        "googlenet": build_googlenet,
        **_gpt2("gpt2", num_layers=12, num_heads=12, width=768),
        **_gpt2("gpt2_medium", num_layers=24, num_heads=16, width=1024),
        **_gpt2("gpt2_large", num_layers=36, num_heads=20, width=1280),
        **_gpt2("gpt2_xl", num_layers=48, num_heads=25, width=1600),
        # The model of Chimera's measurements: width of GPT-2 large with 64 layers.
        "gpt2_64": partial(
            build_gpt, vocab_size=50257, block_size=1024, num_layers=64, num_heads=20, width=1280
        ),
        "mlp": partial(build_mlp, widths=(64, 256, 256, 10)),
        "resnet50": partial(build_resnet, num_blocks=(3, 4, 6, 3)),
        "resnet101": partial(build_resnet, num_blocks=(3, 4, 23, 3)),
        "resnet152": partial(build_resnet, num_blocks=(3, 8, 36, 3)),
        "resnet110_v2": partial(build_resnet_v2, depth=110),
        "resnet1001_v2": partial(build_resnet_v2, depth=1001),
        "resnet_small": build_small_resnet,
        "transformer_l": partial(build_transformer, num_layers=24),
        "unet": build_unet,
        "unet_tiny": partial(build_unet, num_convs=1, base_channels=8, depth=2),
        "vgg16": partial(build_vgg, num_convs=(2, 2, 3, 3, 3)),
        "vgg19": partial(build_vgg, num_convs=(2, 2, 4, 4, 4)),
    }
)


def model_names() -> tuple[str, ...]:
    """Return the sorted names that `build_model` accepts."""
    return tuple(sorted(_MODELS))


def build_model(name: str, **overrides: Any) -> list[LayerSpec]:
    """Return a named model as unbuilt layers; nothing is allocated.

    ``overrides`` replace keywords of the preset: ``build_model("gpt", width=256)``.

    Raises:
        ModelError: the name or a keyword is unknown.
    """
    if name not in _MODELS:
        raise ModelError(
            f"model: unknown name, expected one of {', '.join(model_names())}, got {name!r}; "
            f"choose one of them"
        )
    build = _MODELS[name]
    known = inspect.signature(build).parameters
    unknown = sorted(overrides.keys() - known.keys())
    if unknown:
        raise ModelError(
            f"model {name}: unknown setting, expected some of {', '.join(known)}, got "
            f"{', '.join(unknown)}; correct or remove it"
        )
    return build(**overrides)
