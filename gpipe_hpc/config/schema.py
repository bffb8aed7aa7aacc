"""The schema of ``conf/``: one dataclass a section.

What each setting means stands beside it in the YAML files.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from omegaconf import MISSING

from gpipe_hpc.config.data import DataConfig
from gpipe_hpc.schedule import replicas_on

AUTO_LAYOUT: Final = "auto"
MEASURED_COSTS: Final = "measured"
COSTS: Final = ("counted", MEASURED_COSTS)
"""Of ``pipeline.layout``: a search finds the layout for the ranks that come."""


@dataclass
class PipelineConfig:
    """How the model is cut and in which order the stages work."""

    layout: str = "given"
    stages: Any = None
    ranks: int | None = None
    replicas: int | None = None
    microbatches: int = 8
    schedule: str = "gpipe"
    options: dict[str, Any] = field(default_factory=dict)
    recompute: str = "except_last"
    memory_bytes: Any = None
    offload: bool = False
    partition: Any = "time"
    pins: dict[Any, Any] = field(default_factory=dict)
    paces: Any = None
    normalise_over_replicas: bool = False
    buffers: str = "average"

    @property
    def num_replicas(self) -> int:
        """Return how many pipelines there are; None told, as many as `ranks` make, else one.

        Where ranks have come, `filled` has told it.
        """
        return replicas_on(self.ranks or 0, self.stages, self.replicas)


@dataclass
class BatchRampConfig:
    """How the global batch grows to ``train.batch_size``."""

    start: int | None = None
    steps: int = 0
    increment: int = 1


@dataclass
class TrainConfig:
    """The length of a run, its batches and what is reported on the way."""

    steps: int = 300
    stop_at: int | None = None
    batch_size: int = 32
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    accumulation: int = 1
    seed: int = 0
    precision: str = "float32"
    compile: Any = False
    clip_norm: float | None = 1.0
    validate_every: int = 0
    validate_batches: int | None = None
    log_every: int = 10
    device: str = "auto"
    deterministic: bool = False
    device_flops_per_s: float | None = None
    keep_freed_memory: bool = True
    num_threads: Any = "auto"
    bind: str = "auto"
    stop_grace_s: float | None = 25.0


@dataclass
class OptimizerConfig:
    """What every optimizer has."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    masters: bool = True


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW: Loshchilov and Hutter, Decoupled weight decay regularization, 2019."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    momentum: float = 0.9
    nesterov: bool = False


@dataclass
class RMSPropConfig(OptimizerConfig):
    """RMSProp, as GPipe's paper trains AmoebaNet."""

    alpha: float = 0.9
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False


@dataclass
class LARSConfig(OptimizerConfig):
    """LARS: You, Gitman, Ginsburg, Large batch training of convolutional networks, 2017."""

    momentum: float = 0.9
    trust: float = 0.001
    adapt_vectors: bool = False


@dataclass
class LAMBConfig(OptimizerConfig):
    """LAMB: You et al., Large batch optimization for deep learning, 2019."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-6
    adapt_vectors: bool = False


@dataclass
class OuterConfig:
    """How the replicas' copies of a stage combine their gradients."""

    bucket_bytes: Any = "25MB"
    hierarchy: Any = "none"
    order: str = "backend"
    overlap: bool = True
    compress: str = "none"
    powersgd_rank: int = 2
    topk_fraction: float = 0.01
    qsgd_levels: int = 7
    weights: list[int] | None = None
    shard: str = "none"


@dataclass
class LocalSGDConfig(OuterConfig):
    """Replicas train by themselves and are averaged: Stich, Local SGD converges fast, 2018."""

    every: int = 16


@dataclass
class DiLoCoConfig(OuterConfig):
    """Replicas train by themselves under an outer optimizer: Douillard et al., DiLoCo, 2023."""

    every: int = 64
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    parts: int = 1
    behind: int = 0
    mix: float = 0.5


@dataclass
class LrConfig:
    """The learning rate over the run, as a factor on ``optimizer.lr``."""

    warmup_steps: int = 0
    decay: str = "cosine"
    min_ratio: float = 0.1
    start_ratio: float = 0.0
    base_batch_size: int | None = None
    scaling: str = "linear"
    noise_over: str = "microbatches"
    smoothing: float | None = None


@dataclass
class CheckpointConfig:
    """When a run is saved, and what a new one starts from."""

    every: int = 0
    keep: int = 2
    resume: str = "auto"
    data: str = "same"
    in_background: bool = False
    neighbour_every: int = 0
    neighbour_dir: str | None = None


@dataclass
class CommConfig:
    """How ranks reach each other."""

    backend: str = "auto"
    timeout_s: float = 600.0
    silence_s: float = 15.0
    stall_s: float | None = None
    reach_s: float = 20.0
    interface: str | None = None
    loopback: bool | None = None
    mpi_device_pointers: bool | None = None
    shared_memory: bool = True
    secret_file: str | None = None


@dataclass
class RunConfig:
    """Where a run writes."""

    dir: str | None = None


@dataclass
class MetricsConfig:
    """Where the figures of steps go beside ``metrics.jsonl``."""

    to: list[str] = field(default_factory=lambda: ["tensorboard"])
    project: str = "gpipe_hpc"


@dataclass
class TraceConfig:
    """Measured timelines."""

    steps: int = 20
    from_step: int | None = None
    keep: str = "median"
    review_after: int = 10


@dataclass
class CostsConfig:
    """Times of each op in a drawing of a schedule that was not measured.

    A number, or a list of one for each stage.
    """

    forward: Any = 1.0
    backward: Any = None
    input_gradient: Any = 1.0
    weight_gradient: Any = 1.0
    recompute: Any = 1.0
    send: Any = 0.0
    reduction: Any = 0.0
    gather: Any = 0.0


@dataclass
class DrawConfig:
    """What ``python -m gpipe_hpc.draw`` makes."""

    format: str = "auto"
    out: str | None = None
    width: int | None = None
    compare: list[str] = field(default_factory=list)
    buckets: int = 1
    costs: CostsConfig = field(default_factory=CostsConfig)


@dataclass
class PlanConfig:
    """What ``python -m gpipe_hpc.plan`` plans for."""

    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    precisions: dict[str, Any] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    search: bool = False
    ranks: int | None = None
    hosts: int | None = None
    links: str | None = None
    prices: str | None = None
    costs: str | None = None
    calibration: str | None = None
    link_latency_s: float = 1e-5
    within_bytes_per_s: float | None = None
    within_latency_s: float = 3e-6
    host_copy_bytes_per_s: float | None = None
    layer_s: float = 1e-4
    shown: int = 10


@dataclass
class PreflightConfig:
    """What is looked at before a run, and what ``python -m gpipe_hpc.preflight`` measures."""

    before_run: bool = True
    out: str | None = "links.yaml"
    bytes: Any = "4MB"
    limit_s: float = 20.0
    steps: bool = False
    prices: str = "prices.yaml"


@dataclass
class VerifyConfig:
    """What ``python -m gpipe_hpc.verify`` compares."""

    steps: int = 3


@dataclass
class ExportConfig:
    """How weights are exported."""

    out: str | None = None
    dtype: str | None = None
    prefix: str = "layers."
    trust: bool = False


@dataclass
class ReportConfig:
    """What ``python -m gpipe_hpc.report`` makes."""

    format: str = "auto"
    out: str | None = None
    runs: list[str] = field(default_factory=list)


@dataclass
class BenchConfig:
    """Over what ``python -m gpipe_hpc.bench`` sweeps; an empty list means the run's own setting."""

    workloads: list[str] = field(default_factory=lambda: ["steps"])
    ranks: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=lambda: [1])
    batch_sizes: list[int] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    steps: int = 5
    limit_s: float = 600.0
    out: str | None = None


@dataclass
class Config:
    """All settings of a run."""

    model: dict[str, Any] = field(default_factory=dict)
    data: DataConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    outer: OuterConfig = field(default_factory=OuterConfig)
    lr: LrConfig = field(default_factory=LrConfig)
    loss: dict[str, Any] = field(default_factory=dict)
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
