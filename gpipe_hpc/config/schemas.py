"""The dataclasses that Hydra knows by name: ``conf/`` names them as ``/schema/NAME``."""

from typing import Any, Final

from gpipe_hpc.config.data import (
    Cifar100Config,
    CifarConfig,
    DigitsConfig,
    FashionMnistConfig,
    IdxConfig,
    ImageFolderConfig,
    ImageShardsConfig,
    JsonLinesConfig,
    PythonSourceConfig,
    SyntheticImagesConfig,
    SyntheticMasksConfig,
    SyntheticTokensConfig,
    SyntheticVectorsConfig,
    TextConfig,
    TokensConfig,
)
from gpipe_hpc.config.schema import (
    AdamWConfig,
    Config,
    RMSPropConfig,
    SGDConfig,
)

SCHEMAS: Final[tuple[tuple[str, Any], ...]] = (
    ("config", Config),
    ("adamw", AdamWConfig),
    ("sgd", SGDConfig),
    ("rmsprop", RMSPropConfig),
    ("python_source", PythonSourceConfig),
    ("text", TextConfig),
    ("synthetic_tokens", SyntheticTokensConfig),
    ("synthetic_vectors", SyntheticVectorsConfig),
    ("synthetic_images", SyntheticImagesConfig),
    ("synthetic_masks", SyntheticMasksConfig),
    ("tokens", TokensConfig),
    ("jsonl", JsonLinesConfig),
    ("digits", DigitsConfig),
    ("idx", IdxConfig),
    ("fashion_mnist", FashionMnistConfig),
    ("cifar10", CifarConfig),
    ("cifar100", Cifar100Config),
    ("image_folder", ImageFolderConfig),
    ("image_shards", ImageShardsConfig),
)
