"""The settings of a run: the schema of ``conf/``, how they are composed, and all checks on them."""

from gpipe_hpc.config.checks import check_config
from gpipe_hpc.config.composing import (
    compose_config,
    config_yaml,
    load_config,
    register_schemas,
)
from gpipe_hpc.config.data import (
    DataConfig,
    ImageDataConfig,
    TokenDataConfig,
    mask_token_of,
    num_tokens_of,
)
from gpipe_hpc.config.presets import conf_dir
from gpipe_hpc.config.schema import (
    AdamWConfig,
    BenchConfig,
    CheckpointConfig,
    CommConfig,
    Config,
    CostsConfig,
    DrawConfig,
    ExportConfig,
    LrConfig,
    OptimizerConfig,
    PipelineConfig,
    PlanConfig,
    RMSPropConfig,
    RunConfig,
    SGDConfig,
    TraceConfig,
    TrainConfig,
    VerifyConfig,
)
from gpipe_hpc.config.targets import bind_loss, bind_target, build_target, check_stored_target

__all__ = [
    "AdamWConfig",
    "BenchConfig",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "CostsConfig",
    "DataConfig",
    "DrawConfig",
    "ExportConfig",
    "ImageDataConfig",
    "LrConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PlanConfig",
    "RMSPropConfig",
    "RunConfig",
    "SGDConfig",
    "TokenDataConfig",
    "TraceConfig",
    "TrainConfig",
    "VerifyConfig",
    "bind_loss",
    "bind_target",
    "build_target",
    "check_config",
    "check_stored_target",
    "compose_config",
    "conf_dir",
    "config_yaml",
    "load_config",
    "mask_token_of",
    "num_tokens_of",
    "register_schemas",
]
