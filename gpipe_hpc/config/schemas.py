"""The dataclasses that Hydra knows by name: ``conf/`` names them as ``/schema/NAME``."""

from typing import Any, Final

from gpipe_hpc.config.schema import (
    AdamWConfig,
    Config,
    DiLoCoConfig,
    LAMBConfig,
    LARSConfig,
    LocalSGDConfig,
    OuterConfig,
    RMSPropConfig,
    SGDConfig,
)

SCHEMAS: Final[tuple[tuple[str, Any], ...]] = (
    ("config", Config),
    ("outer", OuterConfig),
    ("local_sgd", LocalSGDConfig),
    ("diloco", DiLoCoConfig),
    ("adamw", AdamWConfig),
    ("sgd", SGDConfig),
    ("rmsprop", RMSPropConfig),
    ("lars", LARSConfig),
    ("lamb", LAMBConfig),
)
