"""All settings of a run."""

from dataclasses import dataclass, field
from typing import Any

from gpipe_hpc.settings.commands import (
    BenchConfig,
    DrawConfig,
    ExportConfig,
    PlanConfig,
    PreflightConfig,
    ReportConfig,
    VerifyConfig,
)
from gpipe_hpc.settings.data import DataConfig
from gpipe_hpc.settings.fields import check_values, normalise
from gpipe_hpc.settings.parallel import CommConfig, Outer, PipelineConfig
from gpipe_hpc.settings.training import (
    AdamWConfig,
    CheckpointConfig,
    LrConfig,
    MetricsConfig,
    OptimizerConfig,
    RunConfig,
    TraceConfig,
    TrainConfig,
)


@dataclass
class Config:
    """All settings of a run."""

    model: dict[str, Any] = field(default_factory=dict)
    """What is trained. model=NAME chooses a preset."""

    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    outer: Outer = field(default_factory=Outer)
    lr: LrConfig = field(default_factory=LrConfig)

    loss: dict[str, Any] = field(default_factory=dict)
    """The loss, as loss._target_=my.module.loss_fn with its keywords. {}: the one that fits the
    data."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    run: RunConfig = field(default_factory=RunConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    draw: DrawConfig = field(default_factory=DrawConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)

    def normalise(self) -> None:
        """Replace common spellings by our own names and numbers, in place; raises ConfigError."""
        normalise(self)

    def check_values(self) -> None:
        """Check each value by its own range and choices; raises ConfigError."""
        check_values(self)
