"""The settings of a run: the schema of ``conf/``, how they are composed, and all checks on them.

Names are resolved on first use: the library needs parts of this package, and no Hydra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        BatchRampConfig,
        BenchConfig,
        CheckpointConfig,
        CommConfig,
        Config,
        CostsConfig,
        DrawConfig,
        ExportConfig,
        LAMBConfig,
        LARSConfig,
        LrConfig,
        MetricsConfig,
        OptimizerConfig,
        OuterConfig,
        PipelineConfig,
        PlanConfig,
        PreflightConfig,
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
    "BatchRampConfig",
    "BenchConfig",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "CostsConfig",
    "DataConfig",
    "DrawConfig",
    "ExportConfig",
    "ImageDataConfig",
    "LAMBConfig",
    "LARSConfig",
    "LrConfig",
    "MetricsConfig",
    "OptimizerConfig",
    "OuterConfig",
    "PipelineConfig",
    "PlanConfig",
    "PreflightConfig",
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


def __getattr__(name: str) -> Any:
    homes = {
        "AdamWConfig": "schema",
        "BatchRampConfig": "schema",
        "BenchConfig": "schema",
        "CheckpointConfig": "schema",
        "CommConfig": "schema",
        "Config": "schema",
        "CostsConfig": "schema",
        "DataConfig": "data",
        "DrawConfig": "schema",
        "ExportConfig": "schema",
        "ImageDataConfig": "data",
        "LAMBConfig": "schema",
        "LARSConfig": "schema",
        "LrConfig": "schema",
        "MetricsConfig": "schema",
        "OptimizerConfig": "schema",
        "OuterConfig": "schema",
        "PipelineConfig": "schema",
        "PlanConfig": "schema",
        "PreflightConfig": "schema",
        "RMSPropConfig": "schema",
        "RunConfig": "schema",
        "SGDConfig": "schema",
        "TokenDataConfig": "data",
        "TraceConfig": "schema",
        "TrainConfig": "schema",
        "VerifyConfig": "schema",
        "bind_loss": "targets",
        "bind_target": "targets",
        "build_target": "targets",
        "check_config": "checks",
        "check_stored_target": "targets",
        "compose_config": "composing",
        "conf_dir": "presets",
        "config_yaml": "composing",
        "load_config": "composing",
        "mask_token_of": "data",
        "num_tokens_of": "data",
        "register_schemas": "composing",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
