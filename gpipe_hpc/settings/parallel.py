"""Settings of the pipeline, of data parallelism, and of the communication between ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, groupby
from math import gcd, lcm
from typing import Annotated, Any, Final

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import replicas_on
from gpipe_hpc.settings.commands import is_time
from gpipe_hpc.settings.fields import (
    Choices,
    Level,
    Range,
    bytes_of_ranks,
    canonical_precision,
    lowered,
    named_schedule,
    normalise,
    num_bytes,
    number_or,
    refuse,
    settings_of,
)

PARTITIONS: Final = ("time", "simulated", "parameters", "uniform")
"""Named values of ``pipeline.partition``; a list of layer counts is allowed too."""

MAX_TIMEOUT_S: Final = 1e6
"""Longest timeout, about 11 days: the largest that fits poll's 32-bit milliseconds."""


@dataclass
class PipelineConfig:
    """How the model is divided into stages, and the schedule that the stages run."""

    layout: Annotated[str, Choices("given", "auto"), Level.EVERYDAY] = "given"
    """given: use the layout that these settings describe. auto: train searches for the fastest
    layout on its ranks before step 1, as plan.search=true does; settings on the command line are
    kept."""

    stages: Annotated[Any, Range(1), number_or("fit"), Level.EVERYDAY] = None
    """Ranks of one pipeline. null: world size / replicas. fit: the number that is fastest on these
    ranks and, if pipeline.memory_bytes is set, fits into it. If the number of ranks is no multiple
    of stages, some pipelines have fewer ranks."""

    replicas: Annotated[int | None, Range(1), Level.EVERYDAY] = None
    """Number of pipelines that train in parallel (data parallelism), each on its share of the
    global batch. null: world size / pipeline.stages, or 1 if pipeline.stages is not set."""

    microbatches: Annotated[int, Range(1), Level.EVERYDAY] = 8
    """Number of micro-batches into which a replica's share of the batch is divided."""

    schedule: Annotated[str, named_schedule, Level.EVERYDAY] = "gpipe"
    """Pipeline schedule: gpipe, one_f_one_b, interleaved, zb_h1, zb_v, chimera, dualpipe_v, ...
    auto: search for a schedule that suits the measured layers. file: run your own table."""

    options: Annotated[dict[str, Any], Level.EVERYDAY] = field(default_factory=dict)
    """Options of the schedule, set with pipeline.options.NAME=VALUE."""

    recompute: Annotated[
        str, Choices("always", "except_last", "never", "budget"), Level.EVERYDAY
    ] = "except_last"
    """Activations to recompute instead of storing them: always (all), except_last (all except those
    of a micro-batch whose backward pass is the next action), never, or budget (as few as
    pipeline.memory_bytes allows)."""

    memory_bytes: Annotated[Any, Range(1), bytes_of_ranks, Level.EVERYDAY] = None
    """Memory that a rank may use, for example 16e9 or 16GB, or a list with that of each rank, for
    example [16GB,24GB]. Used by recompute=budget, schedule=auto, the partitioner and the forecasts
    of plan and train. null: no limit."""

    partition: Annotated[Any, lowered, Level.EVERYDAY] = "time"
    """How layers are assigned to stages: time (balance the times measured on rank 0), simulated
    (like time; if ranks have several stages, choose the fastest partition in a simulation),
    parameters (balance the number of parameters), uniform (balance the number of layers), or the
    number of layers of each stage, for example [5,6]."""

    offload: bool = False
    """Move stored activations to host memory until shortly before their backward pass. Accelerators
    only."""

    pins: dict[Any, Any] = field(default_factory=dict)
    """Layers assigned to fixed stages, for example {0: 0, 11: 2, GPTHead: -1}. A layer is named by
    its index or by a name that only one layer has; negative numbers count from the end."""

    ranks: Annotated[int | None, Range(1)] = None
    """Number of ranks of all pipelines, for commands that start no ranks (plan, draw, verify).
    null: stages x replicas. train uses the ranks that its launcher started."""

    paces: Annotated[Any, Choices("measured")] = None
    """Relative time that each rank of a pipeline needs for the same work, for example [1,1,2].
    measured: each rank times the same work at the start. null: all equal (measured with
    layout=auto). Used by the partitioner, by schedule=auto and by forecasts."""

    normalise_over_replicas: bool = False
    """Compute BatchNorm statistics over one micro-batch of all replicas together."""

    buffers: Annotated[str, Choices("average", "first", "each")] = "average"
    """How replicas combine buffers that forward passes change, such as running means: average
    (weighted by samples; integers are taken from the first replica), first (taken from the first
    replica), each (every replica keeps its own)."""

    @property
    def is_searched(self) -> bool:
        """Return whether the layout is searched for the ranks of the run."""
        return self.layout == "auto"

    @property
    def num_replicas(self) -> int:
        """Return the number of pipelines: `replicas`, or computed from `ranks` and `stages`, or
        1."""
        return replicas_on(self.ranks or 0, self.stages, self.replicas)

    def check(self, num_stages: int | None) -> None:
        """Raise ConfigError for a partition, a memory budget or paces that cannot work.

        Args:
            num_stages: Ranks of one pipeline; None if not known yet.
        """
        self._check_partition(num_stages)
        if self.recompute == "budget" and self.memory_bytes is None:
            raise refuse(
                "pipeline.memory_bytes",
                "the bytes that a rank may use, with pipeline.recompute=budget",
                None,
                "set pipeline.memory_bytes=16e9, for example, or choose another pipeline.recompute",
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
                f"{num_stages} counts of at least 0, or a multiple with several stages per rank",
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
    """How replicas combine their gradients, or with outer.every their parameters."""

    bucket_bytes: Annotated[Any, Range(0, excludes_least=True), num_bytes] = 25e6
    """Largest size of a bucket of gradients that are all-reduced together, for example 25MB. A
    larger parameter has a bucket of its own."""

    overlap: bool = True
    """All-reduce a bucket as soon as its gradients are complete, in parallel with the last backward
    pass of the stage. false: after that backward pass."""

    hierarchy: Annotated[Any, Level.CLUSTER] = "none"
    """Hierarchical all-reduce. host: within each host first, then between hosts. A number: the
    same, with this many consecutive replicas counted as one host. none: one all-reduce over all
    replicas."""

    order: Annotated[str, Choices("backend", "rank")] = "backend"
    """Order in which gradients are added. backend: that of the backend's all-reduce. rank: by rank,
    which gives the same bits for every number of replicas and every bucket size."""

    compress: Annotated[
        str,
        Choices("none", "bfloat16", "float16", "powersgd", "topk", "qsgd"),
        canonical_precision,
        Level.CLUSTER,
    ] = "none"
    """Compression of the gradients that replicas exchange (with outer.every: of the parameter
    changes): none (exact), bfloat16, float16, powersgd (low rank), topk (largest numbers) or qsgd
    (stochastic rounding). The compression error is added to the gradients of the next step."""

    powersgd_rank: Annotated[int, Range(1)] = 2
    """With compress=powersgd: rank of the low-rank factors."""

    topk_fraction: Annotated[float, Range(1e-9, 0.5)] = 0.01
    """With compress=topk: fraction of the numbers of a bucket that are sent."""

    qsgd_levels: Annotated[int, Range(7, 127)] = 7
    """With compress=qsgd: quantization levels on each side of 0, from 7 (4 bits per number) to 127
    (8 bits)."""

    shard: Annotated[str, Choices("none", "flat", "oss"), Level.CLUSTER] = "none"
    """Sharding of the optimizer state over replicas (ZeRO): none (each replica has all of it), flat
    (an equal part of every bucket, with sharded gradients) or oss (whole tensors, by fairscale's
    OSS)."""

    weights: Annotated[list[int] | None, Range(1), Level.CLUSTER] = None
    """Relative shares of the micro-batches for replicas of unequal speed: with [3,1] the first
    replica runs three times as many as the second. null: equal shares."""

    every: Annotated[int, Range(0), Level.CLUSTER] = 0
    """Local SGD or DiLoCo: number of steps that replicas train independently before they average
    their parameters in an outer step. Not exact. Must divide train.steps. 0: replicas all-reduce
    gradients in every step."""

    lr: Annotated[float, Range(0, excludes_least=True)] = 1.0
    """With outer.every: learning rate of the outer SGD."""

    momentum: Annotated[float, Range(0, 1, excludes_most=True)] = 0.0
    """With outer.every: momentum of the outer SGD."""

    nesterov: bool = False
    """With outer.every: Nesterov momentum."""

    parts: Annotated[int, Range(1)] = 1
    """With outer.every: number of parts of the model that are averaged at different steps, each
    once in outer.every steps."""

    behind: Annotated[int, Range(0)] = 0
    """With outer.every: number of steps that training continues while an average is computed. 0:
    training waits for the average."""

    mix: Annotated[float, Range(0, 1, excludes_most=True)] = 0.5
    """With outer.behind: weight of a replica's own parameters when a delayed average is applied."""

    @property
    def uses_local_sgd(self) -> bool:
        """Return whether replicas train on their own gradients between outer steps."""
        return self.every > 0

    @property
    def num_residuals(self) -> int:
        """Return the compression-error elements that a replica stores per parameter element."""
        return int(self.compress != "none")

    @property
    def num_local_sgd(self) -> float:
        """Return the elements that a replica stores for outer steps per parameter element.

        They are the anchor, the momentum, and an average that is still being computed.
        """
        if not self.uses_local_sgd:
            return 0
        return 1 + (self.momentum > 0) + (1 / self.parts if self.behind else 0)

    def checked(self) -> "Outer":
        """Return a copy with canonical spellings; raise ConfigError if the settings cannot work."""
        found = replace(self)
        normalise(found, "outer.")
        found.check()
        return found

    def check(self) -> None:
        """Raise ConfigError for values and combinations that cannot work."""
        for setting in settings_of(Outer):
            setting.check_kind(getattr(self, setting.name), f"outer.{setting.name}")
            setting.check(getattr(self, setting.name), f"outer.{setting.name}")
        is_number = type(self.hierarchy) is int and self.hierarchy >= 1
        if not is_number and self.hierarchy not in ("none", "host"):
            raise refuse(
                "outer.hierarchy",
                "none, host or a number of replicas",
                self.hierarchy,
                "choose one of these",
            )
        ways = {"hierarchy": "none", "order": "backend", "compress": "none"}
        chosen = [
            f"outer.{name}={getattr(self, name)}"
            for name, plain in ways.items()
            if getattr(self, name) != plain
        ]
        if len(chosen) > 1:
            raise ConfigError(
                f"config: {' and '.join(chosen)} cannot be combined, because each of them changes "
                f"how gradients are summed; set only one"
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
        """Raise ConfigError for settings that sharding excludes.

        Args:
            chosen: The settings that change how gradients are summed, as NAME=VALUE.
        """
        if self.shard == "flat" and chosen and self.order != "rank":
            raise ConfigError(
                f"config: outer.shard=flat gives each replica a part of the sum and cannot be "
                f"combined with {chosen[0]}; set only one of them, or use outer.shard=oss"
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
        if self.nesterov and not self.momentum:
            raise refuse("outer.nesterov", "false without momentum", True, "set outer.momentum=0.9")
        if self.parts > self.every:
            raise refuse(
                "outer.parts",
                f"1 to outer.every={self.every}, since each part is averaged in its own step",
                self.parts,
                "correct outer.parts or outer.every",
            )
        if self.behind >= self.every:
            raise refuse(
                "outer.behind",
                f"0 to {self.every - 1}, so that the average of a part arrives before the next one "
                f"starts after outer.every={self.every} steps",
                self.behind,
                "correct outer.behind or outer.every",
            )

    def check_copies(self, num_copies: int) -> None:
        """Raise ConfigError if the hierarchy does not divide the number of replicas."""
        if isinstance(self.hierarchy, int) and num_copies % self.hierarchy:
            fitting = [n for n in range(1, num_copies + 1) if num_copies % n == 0]
            raise refuse(
                "outer.hierarchy",
                f"a divisor of the {num_copies} copies of a stage",
                self.hierarchy,
                f"choose one of {', '.join(map(str, fitting))}, or host",
            )

    def inexact(self) -> str:
        """Return why results differ from those of one process; empty if they do not."""
        if not self.uses_local_sgd:
            if self.compress == "none":
                return ""
            return (
                f"outer.compress={self.compress}: not exact. Replicas send compressed gradients "
                f"and add the compression error to the next step's gradients; tied parameters are "
                f"summed uncompressed. outer.compress=none is exact"
            )
        parts = f", in {self.parts} parts in turn" if self.parts > 1 else ""
        behind = f", arriving {self.behind} steps later" if self.behind else ""
        sent = "" if self.compress == "none" else f", sent as {self.compress}"
        return (
            f"outer.every={self.every}: not exact. Replicas train independently; every "
            f"{self.every} steps their parameters are averaged{parts}{behind}, and an outer SGD of "
            f"rate {self.lr:g} with momentum {self.momentum:g} steps on their mean change{sent}. "
            f"outer=allreduce is exact"
        )

    def unused(self) -> list[str]:
        """Return a message for each setting that was given and has no effect."""
        found = [
            f"outer.{name} is only used with outer.compress={compress}, got {self.compress}"
            for name, compress in _OF_COMPRESSOR
            if self._is_set(name) and self.compress != compress
        ]
        if self._is_set("mix") and not self.behind:
            found.append("outer.mix is only used with outer.behind above 0, got 0")
        return found

    def _is_set(self, name: str) -> bool:
        """Return whether a setting differs from its default."""
        return bool(getattr(self, name) != getattr(Outer, name))


@dataclass(frozen=True)
class MicrobatchSplit:
    """How many consecutive micro-batches of the global batch each replica runs.

    Args:
        runs: Pairs (number of consecutive replicas, micro-batches of each), which are few even for
            thousands of replicas.
    """

    runs: tuple[tuple[int, int], ...] = ((1, 1),)

    @classmethod
    def of_counts(cls, counts: Iterable[int]) -> "MicrobatchSplit":
        """Return the split with this number of micro-batches for each replica."""
        return cls(tuple((len(list(equal)), count) for count, equal in groupby(counts)))

    @classmethod
    def divide(
        cls, microbatches: int, replicas: int, weights: Sequence[int] | None
    ) -> "MicrobatchSplit":
        """Divide replicas x `microbatches` in proportion to the weights; None divides evenly.

        Raises ConfigError unless there is one weight per replica and the division is exact.
        """
        if weights is None:
            return cls(((replicas, microbatches),))
        if len(weights) != replicas:
            raise ConfigError(
                f"outer.weights: expected a weight for each of {replicas} replica(s), got "
                f"{len(weights)}: {list(weights)}; write {replicas} numbers, or leave it out "
                f"for equal shares"
            )
        least = reduce(gcd, weights)
        parts = [weight // least for weight in weights]
        total, whole = microbatches * replicas, sum(parts)
        if total % whole:
            step = lcm(whole, replicas) // replicas
            below = microbatches // step * step
            near = " or ".join(str(number) for number in (below, below + step) if number)
            raise ConfigError(
                f"outer.weights: replicas x micro-batches must be a multiple of {whole} to be "
                f"divided in proportion to {list(weights)}, got {replicas} x {microbatches} = "
                f"{total}; use {near} micro-batches (pipeline.microbatches x train.accumulation), "
                f"or other weights"
            )
        return cls.of_counts(total // whole * part for part in parts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of micro-batches of each replica."""
        return tuple(count for number, count in self.runs for _ in range(number))

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas."""
        return sum(number for number, _ in self.runs)

    @property
    def total(self) -> int:
        """Return the number of global micro-batches."""
        return sum(number * count for number, count in self.runs)

    @property
    def most(self) -> int:
        """Return the largest number of micro-batches of a replica."""
        return max(count for _, count in self.runs)

    @property
    def fullest(self) -> int:
        """Return the first replica with the largest number of micro-batches."""
        starts = accumulate((number for number, _ in self.runs), initial=0)
        runs = zip(starts, self.runs, strict=False)
        return next(start for start, (_, count) in runs if count == self.most)

    @property
    def are_equal(self) -> bool:
        """Return whether all replicas run the same number of micro-batches."""
        return len({count for _, count in self.runs}) == 1

    def of(self, replica: int) -> range:
        """Return the indices of a replica's micro-batches in the global batch."""
        first = skipped = 0
        for number, count in self.runs:
            if replica < skipped + number:
                first += (replica - skipped) * count
                return range(first, first + count)
            first, skipped = first + number * count, skipped + number
        raise IndexError(f"expected one of {skipped} replicas, got {replica}")

    def owner(self, microbatch: int) -> tuple[int, int]:
        """Return the replica that runs a global micro-batch, and the index within that replica."""
        ends = list(accumulate(self.counts))
        replica = next(number for number, end in enumerate(ends) if microbatch < end)
        return replica, microbatch - self.of(replica).start


_Timeout: Final = Range(0, MAX_TIMEOUT_S, excludes_least=True)


@dataclass
class CommConfig:
    """Communication between ranks: backend, network interface, timeouts, secret."""

    backend: Annotated[str, Level.CLUSTER] = "auto"
    """Backend of communication: auto (nccl for cuda, xccl for xpu, gloo for CPUs), gloo (through
    host memory), nccl, xccl, or mpi (through mpi4py, started by mpiexec or srun --mpi=pmi2)."""

    timeout_s: Annotated[float, _Timeout, Level.CLUSTER] = 600.0
    """Seconds that a rank waits for another one before all ranks stop with an error."""

    silence_s: Annotated[float, Range(3, MAX_TIMEOUT_S), Level.CLUSTER] = 15.0
    """Seconds without a heartbeat after which a process counts as lost. A warning is logged after
    0.4 of this time."""

    stall_s: Annotated[float | None, _Timeout, Level.CLUSTER] = None
    """Seconds without progress after which a rank that still sends heartbeats is reported. null:
    ten times the longest pause so far."""

    reach_s: Annotated[float, _Timeout, Level.CLUSTER] = 20.0
    """Seconds in which the host of MASTER_ADDR and the hosts of other ranks must answer at the
    start; in preflight also each other rank."""

    interface: Annotated[str | None, Level.CLUSTER] = None
    """Network interface between machines, by name or as a subnet such as 10.0.0.0/8. null: the
    interface of the route to MASTER_ADDR."""

    secret_file: Annotated[str | None, Level.CLUSTER] = None
    """File with mode 600 that contains the secret with which ranks authenticate each other. null:
    the environment variable GPIPE_HPC_SECRET or, if all ranks are on one machine, a secret that is
    created for you."""

    shared_memory: bool = True
    """Send tensors between CPU ranks of one machine through shared memory, and sum the small
    tensors of a step there (not with MPI). false: through the backend."""
