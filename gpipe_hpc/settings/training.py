"""Settings of training, and `Config`, all settings of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final

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
from gpipe_hpc.settings.fields import (
    PRECISIONS,
    Choices,
    Level,
    Range,
    canonical_precision,
    check_values,
    lowered,
    normalise,
    number_or,
    refuse,
)
from gpipe_hpc.settings.parallel import CommConfig, Outer, PipelineConfig


@dataclass
class BatchRampConfig:
    """Growth of the global batch. The number of micro-batches is constant; each one grows."""

    start: Annotated[int | None, Range(1)] = None
    """Samples in the global batch of the first step. null: train.batch_size from the first step
    on."""

    steps: Annotated[int, Range(0)] = 0
    """Steps over which the batch grows linearly to train.batch_size."""

    increment: Annotated[int, Range(1)] = 1
    """The batch grows by multiples of this many samples."""

    def check(self, batch_size: int) -> None:
        """Raise ConfigError if the batch does not grow to `batch_size`."""
        if self.start is None:
            return
        if self.start > batch_size:
            raise refuse(
                "train.batch_ramp.start",
                f"at most train.batch_size={batch_size}, to which the batch grows",
                self.start,
                "raise train.batch_size or lower train.batch_ramp.start",
            )
        if self.steps < 1:
            raise refuse(
                "train.batch_ramp.steps",
                f"the number of steps over which the batch grows from {self.start} to "
                f"{batch_size} samples",
                self.steps,
                "set train.batch_ramp.steps=1000, for example, or train.batch_ramp.start=null for "
                "no ramp",
            )


@dataclass
class TrainConfig:
    """Length of a run, batch size, precision, device."""

    steps: Annotated[int, Range(0), Level.EVERYDAY] = 300
    """Number of optimizer steps of the whole run, over which the learning rate decays."""

    stop_at: Annotated[int | None, Range(0), Level.EVERYDAY] = None
    """Save a checkpoint and exit after this step. null: train until train.steps."""

    batch_size: Annotated[int, Range(1), Level.EVERYDAY] = 32
    """Samples in the global batch: the sum over replicas, micro-batches and accumulation passes."""

    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Growth of the global batch."""

    accumulation: Annotated[int, Range(1), Level.EVERYDAY] = 1
    """Gradient accumulation: passes of pipeline.microbatches micro-batches in one step."""

    seed: Annotated[int, Range(0, 2**64 - 1), Level.EVERYDAY] = 0
    """Seed of the initial weights, dropout, the order of samples and augmentation."""

    precision: Annotated[str, PRECISIONS, canonical_precision, Level.EVERYDAY] = "float32"
    """Precision of forward passes: float32, or bfloat16 or float16 through autocast (float16 with
    loss scaling). Weights stay in float32."""

    compile: Annotated[Any, Level.EVERYDAY] = False
    """Compile each layer with torch.compile: false, true (inductor) or the name of a backend."""

    clip_norm: Annotated[float | None, Range(0, excludes_least=True), Level.EVERYDAY] = 1.0
    """Gradient clipping: largest norm of the gradient of the whole model. null: no clipping."""

    validate_every: Annotated[int, Range(0), Level.EVERYDAY] = 100
    """Number of steps between validations. 0: only at the end."""

    validate_batches: Annotated[int | None, Range(1), Level.EVERYDAY] = 16
    """Global batches in a validation: the same each time, spread over the validation set. null: the
    whole set."""

    log_every: Annotated[int, Range(1)] = 10
    """Steps between progress lines if the output is not a terminal. At most one line per second and
    at least one per minute is printed."""

    device: Annotated[str, lowered, Level.EVERYDAY] = "auto"
    """Device to train on: auto (an accelerator if there is one), cpu, cuda (NVIDIA, AMD), xpu
    (Intel) or another device type of torch. With an index, such as cuda:0, all ranks share that
    device."""

    build_on: Annotated[str, Choices("cpu", "device")] = "cpu"
    """Device on which layers are built. cpu: initial weights are the same for every type of device.
    device: seconds instead of minutes for billions of weights, but the initial weights depend on
    the type of device."""

    deterministic: bool = False
    """Use deterministic operators only (torch.use_deterministic_algorithms); an operator without a
    deterministic version raises an error. Slower on accelerators."""

    device_flops_per_s: Annotated[float | None, Range(1)] = None
    """Peak FLOP/s of a rank's device in train.precision, for example 989e12, for the reported
    utilization. null: looked up by the name of the device; unknown devices have no utilization."""

    keep_freed_memory: bool = True
    """CPU ranks keep freed memory for reuse (glibc): fewer page faults, but up to 10 % more memory
    than planned. false: freed blocks of 1 MiB and more are returned to the system at once."""

    num_threads: Annotated[Any, Range(1), number_or("auto")] = "auto"
    """CPU threads of a rank. auto: OMP_NUM_THREADS if you set it, otherwise one per core of the
    rank, and the same number on all ranks. null: torch's default."""

    bind: Annotated[str, Choices("auto", "none"), Level.CLUSTER] = "auto"
    """CPU affinity of ranks. auto: bind each rank of a machine to separate cores near its device
    (Linux). none: keep the affinity that the launcher set."""

    stop_grace_s: Annotated[float | None, Range(0, excludes_least=True), Level.CLUSTER] = 25.0
    """After SIGTERM, seconds in which the current step may finish; if it does not, the run ends
    with an error. null: no limit."""


@dataclass
class OptimizerConfig:
    """Settings that all optimizers have."""

    lr: Annotated[float, Range(0), Level.EVERYDAY] = 1e-3
    """Peak learning rate. With optimizer=lars: before the factor of each matrix."""

    weight_decay: Annotated[float, Range(0), Level.EVERYDAY] = 0.0
    """Weight decay of matrices; biases and parameters of norms have none. adamw: decoupled, weights
    shrink by lr x weight_decay per step. lamb: added to the update. Others: added to the
    gradient."""

    masters: bool = True
    """Keep float32 master copies of weights that are stored in 16 bits, and update those."""

    def check(self) -> None:
        """Raise ConfigError for settings that cannot work together."""
        betas = getattr(self, "betas", None)
        if betas is not None and len(betas) != 2:
            raise refuse("optimizer.betas", "two numbers", betas, "write it as [0.9,0.95]")


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW: Loshchilov and Hutter, Decoupled weight decay regularization, 2019."""

    weight_decay: float = 0.1

    betas: Annotated[list[float], Range(0, 1, excludes_most=True)] = field(
        default_factory=lambda: [0.9, 0.95]
    )
    """Decay rates of the moving averages of the gradient and of its square."""

    eps: Annotated[float, Range(0)] = 1e-8
    """Constant added to the denominator of an update."""


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.1

    momentum: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.9
    """Momentum. 0: none."""

    nesterov: bool = False
    """Nesterov momentum."""

    def check(self) -> None:
        """Raise ConfigError for settings that cannot work together."""
        super().check()
        if self.nesterov and not self.momentum:
            raise refuse(
                "optimizer.nesterov", "false without momentum", True, "set momentum above 0"
            )


@dataclass
class RMSPropConfig(OptimizerConfig):
    """RMSProp, as GPipe's paper trains AmoebaNet."""

    alpha: Annotated[float, Range(0, 1)] = 0.9
    """Decay rate of the moving average of the squared gradient."""

    eps: Annotated[float, Range(0)] = 1e-8
    """Constant added to the denominator of an update."""

    momentum: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.0
    """Momentum. 0: none."""

    centered: bool = False
    """Divide by the variance of the gradient instead of its mean square (centered RMSProp)."""


@dataclass
class LARSConfig(OptimizerConfig):
    """LARS: You, Gitman, Ginsburg, Large batch training of convolutional networks, 2017."""

    lr: float = 2.0
    weight_decay: float = 1e-4

    momentum: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.9
    """Momentum. 0: none."""

    trust: Annotated[float, Range(0)] = 0.001
    """Trust coefficient: ratio of the norm of an update, before lr, to the norm of its matrix."""

    adapt_vectors: bool = False
    """Scale updates of biases and norm parameters by their norms, too. false: plain momentum with
    lr."""


@dataclass
class LAMBConfig(OptimizerConfig):
    """LAMB: You et al., Large batch optimization for deep learning, 2019."""

    lr: float = 2e-3
    weight_decay: float = 0.01

    betas: Annotated[list[float], Range(0, 1, excludes_most=True)] = field(
        default_factory=lambda: [0.9, 0.999]
    )
    """Decay rates of the moving averages of the gradient and of its square."""

    eps: Annotated[float, Range(0)] = 1e-6
    """Constant added to the denominator of an update."""

    adapt_vectors: bool = False
    """Scale updates of biases and norm parameters by their norms, too. false: plain Adam."""


OPTIMIZERS: Final[Mapping[str, type[OptimizerConfig]]] = MappingProxyType(
    {
        "adamw": AdamWConfig,
        "sgd": SGDConfig,
        "rmsprop": RMSPropConfig,
        "lars": LARSConfig,
        "lamb": LAMBConfig,
    }
)
"""Settings of each optimizer, by the name that ``optimizer=NAME`` takes."""


@dataclass
class LrConfig:
    """Learning-rate schedule, as a factor on optimizer.lr."""

    warmup_steps: Annotated[int, Range(0), Level.EVERYDAY] = 20
    """Warm-up: steps in which the factor rises linearly from lr.start_ratio to 1."""

    decay: Annotated[str, Choices("cosine", "constant"), Level.EVERYDAY] = "cosine"
    """Decay after the warm-up: cosine (to lr.min_ratio at train.steps) or constant."""

    min_ratio: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.1
    """Factor at the end of the cosine decay."""

    start_ratio: Annotated[float, Range(0)] = 0.0
    """Factor at the start of the warm-up. 1: start at the rate of lr.base_batch_size (Goyal et al.,
    2017)."""

    base_batch_size: Annotated[int | None, Range(1)] = None
    """Global batch size for which optimizer.lr was tuned; the rate is scaled to the batch size of
    each step. null: no scaling."""

    scaling: Annotated[str, Choices("linear", "sqrt", "adascale")] = "linear"
    """How the rate is scaled from lr.base_batch_size to the batch size of a step: linear (by batch
    / base), sqrt (by its square root) or adascale (by a gain from 1 to batch / base that is
    estimated from the noise of the gradients). With adascale, lr.warmup_steps and train.steps are
    in steps of the base batch; a step counts as many as its gain."""

    noise_over: Annotated[str, Choices("microbatches", "replicas")] = "microbatches"
    """With lr.scaling=adascale: gradients that are compared to estimate the noise. microbatches:
    the same result in every layout, but a second copy of the gradients. replicas: cheaper, but the
    gain depends on the number of replicas."""

    def check(self) -> None:
        """Raise ConfigError for settings that cannot work together."""
        if self.scaling == "adascale" and self.base_batch_size is None:
            raise refuse(
                "lr.base_batch_size",
                "the batch size for which optimizer.lr is meant, with lr.scaling=adascale",
                None,
                "set it, as lr.base_batch_size=32",
            )


@dataclass
class CheckpointConfig:
    """When a run saves checkpoints, and from which checkpoint a run starts."""

    every: Annotated[int, Range(0), Level.EVERYDAY] = 100
    """Number of steps between checkpoints. 0: only at the end and on a signal."""

    keep: Annotated[int, Range(1), Level.EVERYDAY] = 2
    """Number of newest checkpoints to keep; older ones are removed. If a run resumes from an older
    checkpoint, the same number of the newer ones is kept, too."""

    resume: Annotated[str, Level.EVERYDAY] = "auto"
    """Checkpoint to start from: auto (the newest in run.dir, if any), never, or the path of a
    checkpoint or run folder. auto accepts another layout, train.steps, train.accumulation or exact
    all-reduce; it refuses another model, data, optimizer, lr, batch size, seed or precision, except
    after a requeue or restart by a launcher. A path accepts any change."""

    data: Annotated[str, Choices("same", "new", "any")] = "same"
    """What to do if data, seed or batch size differ from those of the checkpoint: same (raise an
    error), new (keep the weights, start the data from the beginning) or any (continue after the
    same number of samples)."""

    in_background: bool = False
    """Write checkpoints in the background; training waits only for the copy to host memory."""

    neighbour_every: Annotated[int, Range(0), Level.CLUSTER] = 0
    """Number of steps between in-memory checkpoints: copies of each rank's state in the memory of
    its own and of another host. A restart in the same layout loads them first. The newest two are
    kept until the run ends. 0: none."""

    neighbour_dir: str | None = None
    """Folder for in-memory checkpoints on each host: memory-backed and readable by this user only.
    null: /dev/shm."""


@dataclass
class RunConfig:
    """Folder of a run."""

    dir: Annotated[str | None, Level.EVERYDAY] = None
    """Folder for everything that a run writes. null: runs/DATE_TIME_PROCESS, or under Slurm
    runs/slurm_JOB_STEP."""


@dataclass
class MetricsConfig:
    """Experiment trackers for the metrics of each step, besides metrics.jsonl in run.dir."""

    to: Annotated[list[str], Choices("tensorboard", "wandb", "mlflow"), Level.EVERYDAY] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Trackers: tensorboard, wandb, mlflow. wandb and mlflow must be installed and are configured
    by their own environment variables, such as WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME. []:
    none."""

    def check(self) -> None:
        """Raise ConfigError for a tracker that is named twice."""
        if len(set(self.to)) < len(self.to):
            raise refuse("metrics.to", "each tracker once", self.to, "remove the repetition")


@dataclass
class TraceConfig:
    """Measured timelines of steps, for python -m gpipe_hpc.draw and summary.json."""

    steps: Annotated[int, Range(0, 10_000)] = 20
    """Number of steps whose timeline is kept in memory (16 bytes per action and rank) and written
    at the end of the run. 0: none."""

    from_step: Annotated[int | None, Range(1)] = None
    """First traced step, counted from 1. null: trace the last trace.steps steps of the run."""

    keep: Annotated[str, Choices("median", "all")] = "median"
    """Timelines to write: median (of the traced step with the median time) or all."""


@dataclass
class Config:
    """All settings of a run."""

    model: dict[str, Any] = field(default_factory=dict)
    """The model: model=NAME chooses a preset, model.KEY=VALUE sets a keyword of its builder."""

    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    outer: Outer = field(default_factory=Outer)
    lr: LrConfig = field(default_factory=LrConfig)

    loss: dict[str, Any] = field(default_factory=dict)
    """Your own loss: loss._target_=my.module.loss_fn and its keywords, loss.KEY=VALUE. {}: the loss
    that belongs to the data."""

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
        """Replace other spellings by canonical names and numbers, in place; raise ConfigError."""
        normalise(self)

    def check_values(self) -> None:
        """Raise ConfigError for a value that is out of range or not among its choices."""
        check_values(self)
