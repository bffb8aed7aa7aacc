"""Settings of the layout: the pipeline, data parallelism, and communication of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import replicas_on
from gpipe_hpc.settings.commands import is_time
from gpipe_hpc.settings.fields import Choices, Level, Range, normalise, refuse, settings_of
from gpipe_hpc.settings.spelling import (
    BYTES,
    BYTES_OF_RANKS,
    LOWER,
    PRECISION,
    SCHEDULE,
    number_or,
)

PARTITIONS: Final = ("time", "simulated", "parameters", "uniform")
"""Of ``pipeline.partition``, besides a list of counts."""

MAX_TIMEOUT_S: Final = 1e6
"""The longest time to wait, about 11 days: in milliseconds it still fits the 32 bits of poll."""


@dataclass
class PipelineConfig:
    """How the model is cut into stages, and in which order the stages work."""

    layout: Annotated[str, Choices("given", "auto"), Level.EVERYDAY] = "given"
    """given: these settings are the layout. auto: train searches for the fastest one on its ranks
    before step 1, as plan.search=true does; settings on the command line stay."""

    stages: Annotated[Any, Range(1), number_or("fit"), Level.EVERYDAY] = None
    """Ranks of one pipeline. null: world size / replicas. fit: the fastest number for these ranks,
    within pipeline.memory_bytes if that is set. If stages do not divide the ranks, some pipelines
    have fewer ranks."""

    replicas: Annotated[int | None, Range(1), Level.EVERYDAY] = None
    """Pipelines that train in parallel, each on its share of the global batch. null: as many as the
    ranks and pipeline.stages give, 1 without pipeline.stages."""

    microbatches: Annotated[int, Range(1), Level.EVERYDAY] = 8
    """Micro-batches into which a replica's share of the batch is cut."""

    schedule: Annotated[str, SCHEDULE, Level.EVERYDAY] = "gpipe"
    """Schedule: gpipe, one_f_one_b, interleaved, zb_h1, zb_v, chimera, dualpipe_v, ...; auto
    searches one for the measured layers; file runs a table of yours."""

    options: Annotated[dict[str, Any], Level.EVERYDAY] = field(default_factory=dict)
    """Options of the schedule, as pipeline.options.NAME=VALUE."""

    recompute: Annotated[
        str, Choices("always", "except_last", "never", "budget"), Level.EVERYDAY
    ] = "except_last"
    """Activations to recompute: always (all), except_last (all except those that the next action
    needs), never, or budget (as few as fit into memory_bytes)."""

    memory_bytes: Annotated[Any, Range(1), BYTES_OF_RANKS, Level.EVERYDAY] = None
    """Memory that a rank may use, as 16e9 or 16GB, or that of each rank, as [16GB,24GB]. Used by
    recompute=budget, schedule=auto, the partition and the forecasts of plan and train."""

    partition: Annotated[Any, LOWER, Level.EVERYDAY] = "time"
    """How layers are assigned to stages: time (measured on rank 0), simulated (time, and for ranks
    with several stages the fastest partition in simulation), parameters, uniform, or the number of
    layers of each stage, as [5,6]."""

    offload: bool = False
    """Move kept activations to host memory until their backward is near (accelerators)."""

    pins: dict[Any, Any] = field(default_factory=dict)
    """Layers on fixed stages, as {0: 0, 11: 2, GPTHead: -1}. A layer is given by index (negative:
    from the end) or by a name that only one layer has; -1 is the last stage."""

    ranks: Annotated[int | None, Range(1)] = None
    """Ranks of all pipelines, for commands that start none (plan, draw, verify). null: stages x
    replicas. train uses the ranks of its launcher."""

    paces: Annotated[Any, Choices("measured")] = None
    """Time that each rank of a pipeline takes relative to the others, as [1,1,2]; measured: each
    rank times the same work at the start; null: equal (with layout=auto: measured). Used by the
    partitioner, by schedule=auto and by forecasts."""

    normalise_over_replicas: bool = False
    """BatchNorm normalises over a micro-batch of all replicas together."""

    buffers: Annotated[str, Choices("average", "first", "each")] = "average"
    """Buffers that forwards change, if a stage has several copies: average (weighted by samples;
    integers are the first copy's), first (that of the first copy), each (left as they are)."""

    @property
    def is_searched(self) -> bool:
        """Say whether a search finds the layout for the ranks of the run."""
        return self.layout == "auto"

    @property
    def num_replicas(self) -> int:
        """Return the number of pipelines; without `replicas`, as many as `ranks` make, else 1.

        Once ranks are known, `filled` has set `replicas`.
        """
        return replicas_on(self.ranks or 0, self.stages, self.replicas)

    def check(self, num_stages: int | None) -> None:
        """Refuse a partition, a budget or paces that cannot work; raises ConfigError.

        `num_stages`: ranks of one pipeline, None if that is not known yet.
        """
        self._check_partition(num_stages)
        if self.recompute == "budget" and self.memory_bytes is None:
            raise refuse(
                "pipeline.memory_bytes",
                "the bytes that a rank may use, for pipeline.recompute=budget",
                None,
                "set it, as pipeline.memory_bytes=16e9, or choose another pipeline.recompute",
            )
        paces = self.paces
        is_list = isinstance(paces, list) and paces and all(is_time(p) and p for p in paces)
        if not (paces in (None, "measured") or is_list):
            raise refuse(
                "pipeline.paces",
                "measured, or a number above 0 for each rank of a pipeline",
                paces,
                "write it as pipeline.paces=[1,1,2]",
            )

    def _check_partition(self, num_stages: int | None) -> None:
        counts = self.partition
        if isinstance(counts, str) and counts in PARTITIONS:
            return
        named = ", ".join(PARTITIONS)
        if num_stages is None:
            raise refuse(
                "pipeline.partition",
                f"{named} if stages are searched (pipeline.stages=fit, pipeline.layout=auto)",
                counts,
                "set pipeline.stages, or leave pipeline.partition out",
            )
        if not isinstance(counts, list) or not all(type(count) is int for count in counts):
            raise refuse(
                "pipeline.partition",
                f"{named} or the number of layers of each stage",
                counts,
                "write it as pipeline.partition=[5,6]",
            )
        if not counts or len(counts) % num_stages or min(counts) < 0 or not any(counts):
            raise refuse(
                "pipeline.partition",
                f"{num_stages} (or, with several stages per rank, a multiple) counts of at least 0",
                counts,
                "give each stage a count, or set pipeline.partition=time",
            )


_OF_COMPRESSOR: Final = (
    ("powersgd_rank", "powersgd"),
    ("topk_fraction", "topk"),
    ("qsgd_levels", "qsgd"),
)
_OF_LOCAL_SGD: Final = ("lr", "momentum", "nesterov", "parts", "behind", "mix")


@dataclass(kw_only=True)
class Outer:
    """How the replicas' copies of a stage combine their gradients, or their parameters."""

    bucket_bytes: Annotated[Any, Range(0, excludes_least=True), BYTES] = 25e6
    """Gradients of a stage are summed in buckets of at most this size, as 25MB; a larger parameter
    has a bucket of its own."""

    overlap: bool = True
    """Sum a bucket within the stage's last backward, as soon as it is complete. false: after it."""

    hierarchy: Annotated[Any, Level.CLUSTER] = "none"
    """host: sum within each host first, then between hosts. A number: this many copies count as one
    host. none: all at once."""

    order: Annotated[str, Choices("backend", "rank")] = "backend"
    """Order of a sum: the backend's, or that of ranks (the same bits for any number of replicas and
    any buckets)."""

    compress: Annotated[
        str,
        Choices("none", "bfloat16", "float16", "powersgd", "topk", "qsgd"),
        PRECISION,
        Level.CLUSTER,
    ] = "none"
    """What is sent in place of gradients (with outer.every: of changes of parameters): none
    (exact), bfloat16, float16, powersgd, topk, qsgd. The error is added to the next sum."""

    powersgd_rank: Annotated[int, Range(1)] = 2
    """With compress=powersgd: columns of a matrix's two factors."""

    topk_fraction: Annotated[float, Range(1e-9, 0.5)] = 0.01
    """With compress=topk: fraction of a bucket's numbers that is sent."""

    qsgd_levels: Annotated[int, Range(7, 127)] = 7
    """With compress=qsgd: levels on each side of 0, 7 (4 bits per number) to 127 (8 bits)."""

    shard: Annotated[str, Choices("none", "flat", "oss"), Level.CLUSTER] = "none"
    """Optimizer state on each replica: none (all of it), flat (an equal part of each bucket), oss
    (whole tensors, by fairscale's OSS)."""

    weights: Annotated[list[int] | None, Level.CLUSTER] = None
    """Shares of the micro-batches for replicas of unequal speed: with [3,1] the first runs three
    while the second runs one. null: equal shares."""

    every: Annotated[int, Range(0), Level.CLUSTER] = 0
    """Steps between outer steps, in which replicas average their parameters (local SGD, DiLoCo;
    not exact). Has to divide train.steps. 0: replicas sum gradients in every step."""

    lr: Annotated[float, Range(0)] = 1.0
    """With outer.every: learning rate of the outer SGD."""

    momentum: Annotated[float, Range(0, 1)] = 0.0
    """With outer.every: momentum of the outer SGD, less than 1."""

    nesterov: bool = False
    """With outer.every: Nesterov momentum."""

    parts: Annotated[int, Range(1)] = 1
    """With outer.every: parts of the model that are averaged in turn, each every outer.every
    steps."""

    behind: Annotated[int, Range(0)] = 0
    """With outer.every: steps until a part's average arrives, in parallel with training. 0: at
    once."""

    mix: Annotated[float, Range(0, 1)] = 0.5
    """With outer.behind: weight of a replica's own parameters when an average arrives, less
    than 1."""

    @property
    def uses_local_sgd(self) -> bool:
        """Return whether replicas train on their own gradients between outer steps."""
        return self.every > 0

    @property
    def num_residuals(self) -> int:
        """Return how many numbers of each parameter a copy keeps as the error of compression."""
        return int(self.compress != "none")

    @property
    def num_local_sgd(self) -> float:
        """Return how many numbers of each parameter a replica keeps for outer steps.

        The anchor, the momentum, and the average of a part that has not arrived yet.
        """
        if not self.uses_local_sgd:
            return 0
        return 1 + (self.momentum > 0) + (1 / self.parts if self.behind else 0)

    def checked(self) -> "Outer":
        """Return a copy in our own spelling; raises ConfigError for what cannot work."""
        found = replace(self)
        normalise(found, "outer.")
        found.check()
        return found

    def check(self) -> None:
        """Refuse values and combinations that cannot work; raises ConfigError."""
        for setting in settings_of(Outer):
            setting.check_kind(getattr(self, setting.name), f"outer.{setting.name}")
            setting.check(getattr(self, setting.name), f"outer.{setting.name}")
        is_number = type(self.hierarchy) is int and self.hierarchy >= 1
        if not is_number and self.hierarchy not in ("none", "host"):
            raise refuse(
                "outer.hierarchy",
                "none, host or a number of copies",
                self.hierarchy,
                "choose one of these",
            )
        self.checked_weights()
        ways = {"hierarchy": "none", "order": "backend", "compress": "none"}
        chosen = [
            f"outer.{name}={getattr(self, name)}"
            for name, plain in ways.items()
            if getattr(self, name) != plain
        ]
        if len(chosen) > 1:
            raise ConfigError(
                f"config: {' and '.join(chosen)} cannot be combined, expected one way to sum; "
                f"leave all except one out"
            )
        self._check_shard(chosen)
        if self.uses_local_sgd:
            self._check_outer_step()
            return
        for name in filter(self._is_set, _OF_LOCAL_SGD):
            raise refuse(
                f"outer.{name}",
                "the default without outer.every",
                getattr(self, name),
                "set outer.every=64, or leave it out",
            )

    def _check_shard(self, chosen: Sequence[str]) -> None:
        """Refuse what does not go with a divided optimizer; `chosen`: other ways to sum."""
        if self.shard == "flat" and chosen and self.order != "rank":
            raise ConfigError(
                f"config: outer.shard=flat leaves each copy its part of the sum, expected no other "
                f"way to sum than outer.order, got {chosen[0]}; leave that out, or use "
                f"outer.shard=oss"
            )
        if self.shard != "none" and self.uses_local_sgd:
            raise refuse(
                "outer.shard",
                f"none with outer.every={self.every}, since each replica needs the whole "
                f"optimizer state",
                self.shard,
                "leave it out, or use outer=allreduce",
            )

    def _check_outer_step(self) -> None:
        if not self.lr > 0:
            raise refuse("outer.lr", "more than 0", self.lr, "correct outer.lr")
        for name in ("momentum", "mix"):
            value = getattr(self, name)
            if not value < 1:
                raise refuse(f"outer.{name}", "less than 1", value, f"correct outer.{name}")
        if self.nesterov and not self.momentum:
            raise refuse("outer.nesterov", "false without momentum", True, "set outer.momentum=0.9")
        if self.parts > self.every:
            raise refuse(
                "outer.parts",
                f"1 to outer.every={self.every}, since each part has a step of its own",
                self.parts,
                "correct outer.parts or outer.every",
            )
        if self.behind >= self.every:
            raise refuse(
                "outer.behind",
                f"0 to {self.every - 1}, so that a part arrives before it leaves again after "
                f"outer.every={self.every} steps",
                self.behind,
                "correct outer.behind or outer.every",
            )

    def checked_weights(self) -> list[int] | None:
        """Return the shares of replicas; raises ConfigError for what are none."""
        weights = self.weights
        if weights is not None and not (
            isinstance(weights, list | tuple)
            and weights
            and all(type(each) is int and each > 0 for each in weights)
        ):
            raise refuse(
                "outer.weights",
                "a whole number above 0 for each replica",
                weights,
                "write [3,1] if the first of two replicas runs three micro-batches while the "
                "second runs one",
            )
        return weights

    def check_copies(self, num_copies: int) -> None:
        """Refuse a hierarchy that does not fit the copies of a stage; raises ConfigError."""
        if isinstance(self.hierarchy, int) and num_copies % self.hierarchy:
            fitting = [n for n in range(1, num_copies + 1) if num_copies % n == 0]
            raise refuse(
                "outer.hierarchy",
                f"a divisor of the {num_copies} copies of a stage",
                self.hierarchy,
                f"choose one of {', '.join(map(str, fitting))}, or host",
            )

    def unused(self) -> list[str]:
        """Return the settings that were given and have no effect, each with what it is for."""
        found = [
            f"outer.{name} is for outer.compress={compress}, which is {self.compress}"
            for name, compress in _OF_COMPRESSOR
            if self._is_set(name) and self.compress != compress
        ]
        if self._is_set("mix") and not self.behind:
            found.append("outer.mix is for averages that arrive later, and outer.behind is 0")
        return found

    def _is_set(self, name: str) -> bool:
        """Say whether a setting differs from its default."""
        return bool(getattr(self, name) != getattr(Outer, name))


_Timeout: Final = Range(0, MAX_TIMEOUT_S, excludes_least=True)


@dataclass
class CommConfig:
    """How ranks reach each other."""

    backend: Annotated[str, Level.CLUSTER] = "auto"
    """auto (nccl for cuda, xccl for xpu, gloo for CPUs), gloo (through the host), nccl, xccl, or
    mpi (by mpi4py, under mpiexec or srun --mpi=pmi2)."""

    timeout_s: Annotated[float, _Timeout, Level.CLUSTER] = 600.0
    """Seconds that a rank waits for another before all stop with a report."""

    silence_s: Annotated[float, Range(3, MAX_TIMEOUT_S), Level.CLUSTER] = 15.0
    """Seconds without a sign of life after which a process counts as lost. A warning comes after
    0.4 of it."""

    stall_s: Annotated[float | None, _Timeout, Level.CLUSTER] = None
    """Seconds that a living rank may make no progress before it is reported. null: ten times the
    longest so far."""

    reach_s: Annotated[float, _Timeout, Level.CLUSTER] = 20.0
    """Seconds in which a host (that of MASTER_ADDR, and those of other ranks) must answer at the
    start; in preflight also each other rank."""

    interface: Annotated[str | None, Level.CLUSTER] = None
    """Network interface between machines, by name or as a subnet, as 10.0.0.0/8. null: the one that
    leads to MASTER_ADDR."""

    secret_file: Annotated[str | None, Level.CLUSTER] = None
    """File with mode 600 that holds the job's secret. null: $GPIPE_HPC_SECRET, or a new secret on
    one machine."""

    loopback: bool | None = None
    """Listen on this machine only. null: if all ranks are on it."""

    mpi_device_pointers: bool | None = None
    """Let MPI read the memory of accelerators. false: copy through pinned memory. null: if MPI
    supports it."""

    shared_memory: bool = True
    """CPU ranks of one machine pass boundaries through shared memory."""
