"""What a user asks for: everything that decides how a run is laid out and what it computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gpipe_hpc.data_parallel import MicrobatchSplit
from gpipe_hpc.planner.cutting.partition import Partition
from gpipe_hpc.planner.memory.by_rank import FoundPaces
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.schedule import Schedule, digest, num_rows, one_table, refuse_whole_replicas
from gpipe_hpc.settings import Outer, PipelineConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a pipeline by name, except the number of replicas.

    `Pipeline` says what each one means. A field here is a keyword of `Pipeline`, and a setting of
    the same name in the sections `pipeline` and `train` of the configuration becomes that field.
    """

    stages: int | str | None = PipelineConfig.stages
    microbatches: int = 1
    """Micro-batches into which a replica cuts its share of the batch."""
    schedule: str | Schedule = PipelineConfig.schedule
    schedule_options: Mapping[str, Any] | None = None
    """Options of the schedule by name (pipeline.options on the command line)."""
    recompute: str = PipelineConfig.recompute
    memory_bytes: float | str | Sequence[float | str] | None = PipelineConfig.memory_bytes
    optimizer_states: int | OptimizerMemory = 2
    """Numbers that the optimizer keeps per parameter, for forecasts of memory."""
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
    """What is asked for on ranks whose number is known, and so that of the replicas."""

    replicas: int = 1

    @property
    def kept_states(self) -> OptimizerMemory:
        """Return what is kept for each trained parameter beside it and its gradient."""
        states = OptimizerMemory.of(self.optimizer_states)
        num_gradients = int(self.noise_over == "microbatches")
        return states._replace(gradient_copies=num_gradients, replicas=self.replicas)

    @property
    def combining(self) -> Outer:
        """Return how replicas combine their gradients, once the settings are made of it."""
        assert isinstance(self.outer, Outer), f"settings not made yet: {self.outer}"
        return self.outer

    @property
    def portions(self) -> MicrobatchSplit:
        """Return how the micro-batches are divided over replicas; ConfigError if they do not."""
        return MicrobatchSplit.divide(self.microbatches, self.replicas, self.combining.weights)

    def of_one(self, microbatches: int) -> "Request":
        """Return the same request for replicas that all have so many micro-batches."""
        alike = replace(self.combining, weights=None)
        return replace(self, microbatches=microbatches, outer=alike)

    def on(self, num_ranks: int) -> "Request":
        """Return what is asked for on so many ranks: with holes, one pipeline of all of them.

        The same request where stages x replicas are the ranks, or cannot be made so. Raises
        ConfigError for what pipelines with holes cannot do.
        """
        assert not isinstance(self.stages, str), "the stages are known by now"
        rows = num_rows(num_ranks, self.stages, self.replicas)
        if rows is None or self.stages is None:
            return self
        return self.in_rows(num_ranks, self.stages, rows * self.microbatches)

    def in_rows(self, num_ranks: int, stages: int, microbatches: int) -> "Request":
        """Return the request for one pipeline of all ranks, in rows of so many stages.

        Raises ConfigError for what that cannot do.
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
        """Return the schedule's own keywords."""
        return dict(self.schedule_options or {})

    def facts(self) -> dict[str, object]:
        """Return what must be the same on every rank, by name.

        A cut that was made before, and paces that were measured, are for rank 0 alone to know.
        """
        found = {each.name: getattr(self, each.name) for each in fields(Request)}
        if isinstance(self.schedule, Schedule):
            found["schedule"] = f"a table with digest {digest(self.schedule)}"
        if isinstance(self.partition, Partition):
            del found["partition"]
        elif not isinstance(self.partition, str):
            found["partition"] = list(self.partition)
        if isinstance(self.paces, FoundPaces):
            del found["paces"]
        return {name: _plain(value) for name, value in found.items()}


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else repr(value)
