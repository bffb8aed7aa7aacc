"""Position of a world rank in the (dp, pp) mesh: pure arithmetic, no communication."""

from dataclasses import dataclass

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule.partial_replicas import num_rows


def _replicas_that_fit(world_size: int, stages: int) -> str:
    """Return a hint with the number of replicas that uses all ranks; empty if there is none."""
    rows = num_rows(world_size, stages, 1)
    if rows is not None:
        return f", as pipeline.replicas=1 for {rows} pipelines, the last with fewer ranks"
    if world_size % stages:
        return ""
    return f", as pipeline.replicas={world_size // stages}"


@dataclass(frozen=True)
class Mesh:
    """The mesh of replicas x stages: world rank = replica x stages + stage_rank."""

    replicas: int
    stages: int

    @classmethod
    def fit(cls, world_size: int, stages: int | None, replicas: int) -> "Mesh":
        """Return the mesh that uses all `world_size` ranks; `stages=None` derives the stages.

        Raises ConfigError if stages x replicas is not the world size.
        """
        if replicas < 1 or (stages is not None and stages < 1):
            raise ConfigError(
                f"mesh: expected stages and replicas of at least 1, got stages={stages}, "
                f"replicas={replicas}; set pipeline.stages and pipeline.replicas"
            )
        wanted = stages if stages is not None else max(1, world_size // replicas)
        if wanted * replicas != world_size:
            raise ConfigError(
                f"mesh: expected stages x replicas = world size, got {wanted} x {replicas} = "
                f"{wanted * replicas} with {world_size} rank(s); start {wanted * replicas} "
                f"ranks or change pipeline.stages / pipeline.replicas"
                f"{_replicas_that_fit(world_size, wanted)}; pipeline.stages=fit accepts any number"
            )
        return cls(replicas=replicas, stages=wanted)

    @property
    def size(self) -> int:
        """Return the number of world ranks."""
        return self.replicas * self.stages

    def world_rank(self, replica: int, stage_rank: int) -> int:
        """Return the world rank of a position in the mesh."""
        return replica * self.stages + stage_rank

    def replica_of(self, world_rank: int) -> int:
        """Return the replica of a world rank."""
        return world_rank // self.stages

    def stage_rank_of(self, world_rank: int) -> int:
        """Return the position of a world rank within its pipeline."""
        return world_rank % self.stages

    def pipeline_ranks(self, replica: int) -> tuple[int, ...]:
        """Return the world ranks of one replica, in stage order."""
        return tuple(self.world_rank(replica, k) for k in range(self.stages))

    def replica_ranks(self, stage_rank: int) -> tuple[int, ...]:
        """Return the world ranks with the same position in every replica."""
        return tuple(self.world_rank(r, stage_rank) for r in range(self.replicas))
