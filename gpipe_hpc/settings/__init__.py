"""Settings: each is defined once, as a field of a dataclass.

The command line, the keywords of `Pipeline`, the checks of values, ``--help`` and
docs/reference/settings.md are generated from these fields. Nothing here loads torch or Hydra.
"""

from gpipe_hpc.settings.data import DataConfig, ImageDataConfig, Shape, Shapes, TokenDataConfig
from gpipe_hpc.settings.fields import (
    Choices,
    Level,
    Range,
    Setting,
    nearest,
    refuse,
    settings_of,
    suggestion,
)
from gpipe_hpc.settings.parallel import MicrobatchSplit, Outer, PipelineConfig
from gpipe_hpc.settings.training import (
    OPTIMIZERS,
    AdamWConfig,
    Config,
    LAMBConfig,
    LARSConfig,
    OptimizerConfig,
    RMSPropConfig,
    SGDConfig,
    TrainConfig,
)

__all__ = [
    "OPTIMIZERS",
    "AdamWConfig",
    "Choices",
    "Config",
    "DataConfig",
    "ImageDataConfig",
    "LAMBConfig",
    "LARSConfig",
    "Level",
    "MicrobatchSplit",
    "OptimizerConfig",
    "Outer",
    "PipelineConfig",
    "RMSPropConfig",
    "Range",
    "SGDConfig",
    "Setting",
    "Shape",
    "Shapes",
    "TokenDataConfig",
    "TrainConfig",
    "nearest",
    "refuse",
    "settings_of",
    "suggestion",
]
