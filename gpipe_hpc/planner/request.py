"""The settings that decide the layout of a run and its results, as requested by the user."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.memory.by_rank import MeasuredSlowdowns
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.schedule import Schedule, digest, num_rows, one_table, refuse_whole_replicas
from gpipe_hpc.settings import MicrobatchSplit, Outer, PipelineConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a pipeline by name, except the number of replicas.

    `Pipeline` documents the settings. Each field is a keyword of `Pipeline`; a setting of the same
    name in the sections `pipeline` and `train` of the configuration sets that field.
    """

    stages: int | str | None = PipelineConfig.stages
    microbatches: int = 1
    """Number of micro-batches into which a replica divides its share of the batch."""
    schedule: str | Schedule = PipelineConfig.schedule
    schedule_options: Mapping[str, Any] | None = None
    """Options of the schedule by name (pipeline.options on the command line)."""
    recompute: str = PipelineConfig.recompute
    memory_bytes: float | str | Sequence[float | str] | None = PipelineConfig.memory_bytes
    optimizer_states: int | OptimizerMemory = 2
    """Number of values the optimizer keeps per parameter, for memory forecasts."""
    offload: bool = PipelineConfig.offload
    partition: str | Sequence[int] | Partition = "parameters"
    pins: Mapping[int | str, int] | None = None
    paces: Sequence[float] | str | None = PipelineConfig.paces
    seed: int = TrainConfig.seed
    build_on: str = TrainConfig.build_on
    precision: str = TrainConfig.precision
    normalise_over_replicas: bool = PipelineConfig.normalise_over_replicas
    buffers: str = PipelineConfig.buffers
    compile: bool | str = TrainConfig.compile
    noise_over: str | None = None
    """microbatches or replicas: measure how much their gradients differ, for AdaScale."""
    outer: Outer | Mapping[str, Any] = field(default_factory=Outer)
    """How replicas combine gradients: an Outer, or a dict of its fields."""


@dataclass(frozen=True, kw_only=True)
class Request(Settings):
    """Settings of a pipeline together with the number of replicas."""

    replicas: int = 1

    @property
    def kept_states(self) -> OptimizerMemory:
        """Return the optimizer's memory model for this request's replicas and gradient copies."""
        states = OptimizerMemory.of(self.optimizer_states)
        num_gradients = int(self.noise_over == "microbatches")
        return states._replace(gradient_copies=num_gradients, replicas=self.replicas)

    @property
    def combining(self) -> Outer:
        """Return how replicas combine their gradients; requires normalised settings."""
        assert isinstance(self.outer, Outer), f"settings are not normalised: {self.outer}"
        return self.outer

    @property
    def portions(self) -> MicrobatchSplit:
        """Return the split of micro-batches over replicas; raise ConfigError for an invalid one."""
        return MicrobatchSplit.divide(self.microbatches, self.replicas, self.combining.weights)

    def of_one(self, microbatches: int) -> "Request":
        """Return a request in which every replica has `microbatches` micro-batches."""
        alike = replace(self.combining, weights=None)
        return replace(self, microbatches=microbatches, outer=alike)

    def on(self, num_ranks: int) -> "Request":
        """Return the request for a number of ranks that may not divide into whole replicas.

        If they do not, the ranks form one pipeline with partial replicas, the last of which lacks
        some ranks. Otherwise, and with too few or too many ranks, the same request is returned.
        Raises ConfigError for settings that do not support partial replicas.
        """
        assert not isinstance(self.stages, str), "the number of stages is resolved before"
        rows = num_rows(num_ranks, self.stages, self.replicas)
        if rows is None or self.stages is None:
            return self
        return self.in_rows(num_ranks, self.stages, rows * self.microbatches)

    def in_rows(self, num_ranks: int, stages: int, microbatches: int) -> "Request":
        """Return the request for one pipeline of partial replicas, each of `stages` ranks at most.

        Raises ConfigError for settings that do not support partial replicas.
        """
        rows = one_table(num_ranks, stages, microbatches, self.schedule, self.options)
        asked = {
            "normalise_over_replicas": self.normalise_over_replicas,
            "outer.every": self.combining.every,
            "outer.weights": self.combining.weights,
            "noise_over": self.noise_over == "replicas" and self.noise_over,
        }
        refuse_whole_replicas(num_ranks, stages, asked)
        return replace(
            self,
            stages=rows.ranks,
            replicas=1,
            microbatches=rows.microbatches,
            schedule=rows.schedule,
            schedule_options=rows.options,
        )

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the schedule."""
        return dict(self.schedule_options or {})

    def facts(self) -> dict[str, object]:
        """Return the values that must be equal on every rank, by name.

        An existing Partition and measured slowdowns are left out, because only rank 0 has them.
        """
        found = {each.name: getattr(self, each.name) for each in fields(Request)}
        if isinstance(self.schedule, Schedule):
            found["schedule"] = f"a table with digest {digest(self.schedule)}"
        if isinstance(self.partition, Partition):
            del found["partition"]
        elif not isinstance(self.partition, str):
            found["partition"] = list(self.partition)
        if isinstance(self.paces, MeasuredSlowdowns):
            del found["paces"]
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else repr(value)
