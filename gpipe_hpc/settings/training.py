"""Settings of training: length, batches, optimizers, learning rate, checkpoints, metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Final

from gpipe_hpc.settings.fields import Choices, Level, Range, refuse
from gpipe_hpc.settings.spelling import LOWER, PRECISION, PRECISIONS, number_or


@dataclass
class BatchRampConfig:
    """A global batch that grows. The number of micro-batches stays, each grows with the batch."""

    start: Annotated[int | None, Range(1)] = None
    """Samples of the first step's global batch. null: train.batch_size from the first step on."""

    steps: Annotated[int, Range(0)] = 0
    """Steps over which the batch grows linearly to train.batch_size."""

    increment: Annotated[int, Range(1)] = 1
    """The batch grows by multiples of this many samples."""

    def check(self, batch_size: int) -> None:
        """Refuse a ramp that does not lead to `batch_size`; raises ConfigError."""
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
                "set it, as train.batch_ramp.steps=1000, or train.batch_ramp.start=null for no "
                "ramp",
            )


@dataclass
class TrainConfig:
    """Length of a run, batches, numbers and device."""

    steps: Annotated[int, Range(0), Level.EVERYDAY] = 300
    """Optimizer steps of the whole run, over which the learning rate decays."""

    stop_at: Annotated[int | None, Range(0), Level.EVERYDAY] = None
    """Save a checkpoint and exit after this step."""

    batch_size: Annotated[int, Range(1), Level.EVERYDAY] = 32
    """Samples of the global batch, over all replicas, micro-batches and accumulation."""

    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)
    """Growth of the global batch."""

    accumulation: Annotated[int, Range(1), Level.EVERYDAY] = 1
    """Passes of pipeline.microbatches micro-batches that make up one step."""

    seed: Annotated[int, Range(0, 2**64 - 1), Level.EVERYDAY] = 0
    """Seed of initial weights, dropout, the order of samples and augmentation."""

    precision: Annotated[str, PRECISIONS, PRECISION, Level.EVERYDAY] = "float32"
    """Precision of forward passes; bfloat16 and float16 by autocast, float16 with a loss scale.
    Weights stay float32."""

    compile: Annotated[Any, Level.EVERYDAY] = False
    """Compile each layer with torch.compile: true (inductor), or the name of a backend."""

    clip_norm: Annotated[float | None, Range(0, excludes_least=True), Level.EVERYDAY] = 1.0
    """Largest norm of the whole gradient. null: no clipping."""

    validate_every: Annotated[int, Range(0), Level.EVERYDAY] = 100
    """Steps between validations. 0: only at the end."""

    validate_batches: Annotated[int | None, Range(1), Level.EVERYDAY] = 16
    """Global batches of a validation, the same ones each time, spread over the set. null: the whole
    set."""

    log_every: Annotated[int, Range(1)] = 10
    """Steps between progress lines if the output is no terminal; at most one line a second and at
    least one a minute."""

    device: Annotated[str, LOWER, Level.EVERYDAY] = "auto"
    """auto (an accelerator if there is one), cpu, cuda (NVIDIA, AMD), xpu (Intel) or another name.
    With a number, as cuda:0, all ranks share that device."""

    build_on: Annotated[str, Choices("cpu", "device")] = "cpu"
    """Where layers are built. cpu: the same initial weights on every kind of device. device: in
    seconds instead of minutes for billions of weights, which then depend on the kind of device."""

    deterministic: bool = False
    """Use only operators that give the same bits each time, or refuse; slower on accelerators."""

    device_flops_per_s: Annotated[float | None, Range(1)] = None
    """Peak FLOP/s of a rank's device in train.precision, as 989e12. null: looked up by the name of
    the device; for unknown devices no utilization is reported."""

    keep_freed_memory: bool = True
    """CPU ranks keep freed memory (glibc): fewer page faults, but up to a tenth more memory than
    planned. false: blocks of 1 MiB and more are returned at once."""

    num_threads: Annotated[Any, Range(1), number_or("auto")] = "auto"
    """CPU threads of a rank. auto: OMP_NUM_THREADS if you set it, else one per core of the rank,
    the same number on all ranks. null: torch's default."""

    bind: Annotated[str, Choices("auto", "none"), Level.CLUSTER] = "auto"
    """auto binds each rank of a machine to cores of its own, near its device (Linux). none: cores
    as the launcher set them."""

    stop_grace_s: Annotated[float | None, Range(0, excludes_least=True), Level.CLUSTER] = 25.0
    """Seconds from SIGTERM until the end of the step; after that the run ends with a message.
    null: no limit."""


@dataclass
class OptimizerConfig:
    """Settings of every optimizer."""

    lr: Annotated[float, Range(0), Level.EVERYDAY] = 1e-3
    """Peak learning rate. With lars: before each matrix's own factor."""

    weight_decay: Annotated[float, Range(0), Level.EVERYDAY] = 0.0
    """Weight decay of matrices; biases and norms have none. adamw: decoupled, weights shrink by
    lr x weight_decay per step. lamb: added to the update. Others: added to the gradient."""

    masters: bool = True
    """Train a float32 copy of weights that are stored in 16 bits."""

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
        betas = getattr(self, "betas", None)
        if betas is not None and not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise refuse("optimizer.betas", "two numbers, 0 <= beta < 1", betas, "as [0.9,0.95]")


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW: Loshchilov and Hutter, Decoupled weight decay regularization, 2019."""

    weight_decay: float = 0.1

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the moving averages of the gradient and of its square."""

    eps: Annotated[float, Range(0)] = 1e-8
    """Added to the denominator of an update."""


@dataclass
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    lr: float = 0.1

    momentum: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.9
    """Momentum; 0: none."""

    nesterov: bool = False
    """Nesterov momentum."""

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
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
    """Added to the denominator of an update."""

    momentum: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.0
    """Momentum; 0: none."""

    centered: bool = False
    """Divide by the variance instead of the mean square."""


@dataclass
class LARSConfig(OptimizerConfig):
    """LARS: You, Gitman, Ginsburg, Large batch training of convolutional networks, 2017."""

    lr: float = 2.0
    weight_decay: float = 1e-4

    momentum: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.9
    """Momentum; 0: none."""

    trust: Annotated[float, Range(0)] = 0.001
    """Trust coefficient: the ratio of an update to the norm of its matrix, before lr."""

    adapt_vectors: bool = False
    """Scale updates of biases and norms by their norms, too. false: plain momentum at lr."""


@dataclass
class LAMBConfig(OptimizerConfig):
    """LAMB: You et al., Large batch optimization for deep learning, 2019."""

    lr: float = 2e-3
    weight_decay: float = 0.01

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the moving averages of the gradient and of its square."""

    eps: Annotated[float, Range(0)] = 1e-6
    """Added to the denominator of an update."""

    adapt_vectors: bool = False
    """Scale updates of biases and norms by their norms, too. false: plain Adam."""


OPTIMIZERS: Final[Mapping[str, type[OptimizerConfig]]] = MappingProxyType(
    {
        "adamw": AdamWConfig,
        "sgd": SGDConfig,
        "rmsprop": RMSPropConfig,
        "lars": LARSConfig,
        "lamb": LAMBConfig,
    }
)
"""The settings of each optimizer by its name, ``optimizer=NAME``."""


@dataclass
class LrConfig:
    """The learning rate over the run, as a factor on optimizer.lr."""

    warmup_steps: Annotated[int, Range(0), Level.EVERYDAY] = 20
    """Steps of linear rise from start_ratio to 1."""

    decay: Annotated[str, Choices("cosine", "constant"), Level.EVERYDAY] = "cosine"
    """After the warm-up: cosine (to min_ratio at train.steps) or constant."""

    min_ratio: Annotated[float, Range(0, 1), Level.EVERYDAY] = 0.1
    """Factor at the end of the cosine."""

    start_ratio: Annotated[float, Range(0)] = 0.0
    """Factor at the beginning of the warm-up. 1: the rate of the base batch (Goyal et al. 2017)."""

    base_batch_size: Annotated[int | None, Range(1)] = None
    """Global batch size for which optimizer.lr is meant. null: that of the step, so the rate is not
    scaled."""

    scaling: Annotated[str, Choices("linear", "sqrt", "adascale")] = "linear"
    """How the rate grows from base_batch_size to a step's batch size: linear (lr x batch / base),
    sqrt (its root) or adascale (a gain from 1 to batch / base, measured from the gradients' noise).
    With adascale, warmup_steps and train.steps count steps of the base batch; a step counts as many
    as its gain."""

    noise_over: Annotated[str, Choices("microbatches", "replicas")] = "microbatches"
    """With adascale: where the noise is measured. microbatches: the same in every layout, one more
    copy of the gradients. replicas: cheaper, but the gain depends on their number."""

    smoothing: Annotated[float | None, Range(0, 1)] = None
    """With adascale: decay rate of its moving averages, less than 1. null: 1 - parts / 1000, at
    least 0."""

    def check(self) -> None:
        """Refuse settings that cannot work together; raises ConfigError."""
        if self.scaling != "adascale":
            return
        if self.base_batch_size is None:
            raise refuse(
                "lr.base_batch_size",
                "the batch size for which optimizer.lr is meant, with lr.scaling=adascale",
                None,
                "set it, as lr.base_batch_size=32",
            )
        if self.smoothing is not None and self.smoothing >= 1:
            raise refuse("lr.smoothing", "less than 1, or null", self.smoothing, "set it to 0.9")


@dataclass
class CheckpointConfig:
    """When a run is saved, and what a new one starts from."""

    every: Annotated[int, Range(0), Level.EVERYDAY] = 100
    """Steps between checkpoints. 0: only at the end and on a signal."""

    keep: Annotated[int, Range(1), Level.EVERYDAY] = 2
    """Number of the newest checkpoints to keep; older ones are removed. As many that the run went
    back behind are kept."""

    resume: Annotated[str, Level.EVERYDAY] = "auto"
    """auto (the newest of run.dir, if any), never, or the path of a checkpoint or run folder. auto
    accepts another layout, train.steps, accumulation and exact way to sum; it refuses another
    model, data, optimizer, lr, batch size, seed or precision, except after a requeue or restart by
    a launcher. A path accepts any change."""

    data: Annotated[str, Choices("same", "new", "any")] = "same"
    """If the data, the seed or the batch size differ from the checkpoint's: same (refuse), new
    (start the data again, keep the weights) or any (continue at the same number of samples)."""

    in_background: bool = False
    """Write files in parallel with training; a step waits only for a copy to host memory."""

    neighbour_every: Annotated[int, Range(0), Level.CLUSTER] = 0
    """Steps between copies of each rank's state in the memory of its own and of another host; a
    restart in the same layout reads them first. Two copies are kept, and removed at the end.
    0: none."""

    neighbour_dir: str | None = None
    """Memory-backed folder for these copies on each host, readable by this user only.
    null: /dev/shm."""


@dataclass
class RunConfig:
    """Where a run writes."""

    dir: Annotated[str | None, Level.EVERYDAY] = None
    """Folder of all that a run writes. null: runs/DATE_TIME_PROCESS, under Slurm
    runs/slurm_JOB_STEP."""


@dataclass
class MetricsConfig:
    """Where metrics of steps go, besides metrics.jsonl in run.dir."""

    to: Annotated[list[str], Choices("tensorboard", "wandb", "mlflow"), Level.EVERYDAY] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Trackers. wandb and mlflow must be installed, and are configured by their own environment
    variables. []: none."""

    project: Annotated[str, Level.EVERYDAY] = "gpipe_hpc"
    """Project of Weights & Biases, experiment of MLflow."""

    def check(self) -> None:
        """Refuse a tracker that is named twice; raises ConfigError."""
        if len(set(self.to)) < len(self.to):
            raise refuse("metrics.to", "each tracker once", self.to, "remove the repetition")


@dataclass
class TraceConfig:
    """Measured timelines, for python -m gpipe_hpc.draw and summary.json."""

    steps: Annotated[int, Range(0, 10_000)] = 20
    """Number of steps whose timeline is kept in memory (16 bytes per action and rank) and written
    at the end of the run. 0: none."""

    from_step: Annotated[int | None, Range(1)] = None
    """The first of these steps, counted from 1. null: the last trace.steps of the run."""

    keep: Annotated[str, Choices("median", "all")] = "median"
    """Timelines to write: that of the step with the median time, or all."""

    review_after: Annotated[int, Range(0)] = 10
    """After this many steps the partition is compared with the measured times of layers; a warning
    names a much better one. 0: never."""
