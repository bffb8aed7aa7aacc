"""Memory of optimizer state that is sharded over the replicas of a stage."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpipe_hpc.data_parallel import Buckets, FlatLayout, assign_owners
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.costs.layer_trial import LayerWeight
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.stages import StageCount
from gpipe_hpc.schedule import Placement


class ShardBytes(NamedTuple):
    """Bytes of a rank's shard of the optimizer state, and of the padding of its weights."""

    optimizer_bytes: int
    padding_bytes: int = 0


class _ShardSize(NamedTuple):
    """Number of elements of which a rank keeps the state, bytes per element, padding elements."""

    num_elements: int
    size: int
    padding: int = 0


class _StageCopies(NamedTuple):
    """Stages of a rank that have the same replicas, and this rank's position among the replicas.

    `position` None: the maximum over all positions.
    """

    stages: tuple[int, ...]
    number: int
    position: int | None


class OptimizerSharing(NamedTuple):
    """How the optimizer state is sharded over the replicas of stages.

    Attributes:
      shard: ``flat`` or ``oss``, as in `Outer`.
      buckets: buckets of each stage. Weights in no bucket (tied ones) are not sharded.
    """

    shard: str
    replicas: int
    buckets: tuple[Buckets, ...]

    @classmethod
    def of(
        cls, shard: str, replicas: int, buckets: tuple[Buckets, ...]
    ) -> "OptimizerSharing | None":
        """Return the sharding of optimizer state, or None if each replica keeps all of it."""
        return cls(shard, replicas, buckets) if shard != "none" and buckets else None

    def of_rank(
        self,
        model: ModelCount,
        stages: Sequence[StageCount],
        placement: Placement,
        rank: int,
        memory: OptimizerMemory,
        replica: int | None = None,
    ) -> ShardBytes:
        """Return the optimizer bytes of one rank; with `replica` None, the maximum over replicas.

        With flat sharding this may be a few elements more than any rank has, because padding
        between tensors has no state.
        """
        held = placement.stages_of(rank)
        weights = model.named_weights(layer for stage in held for layer in stages[stage].layers)
        divided = {name for stage in held for bucket in self.buckets[stage] for name in bucket}
        parts: list[_ShardSize] = []
        for copies in self._copies(placement, rank, replica):
            divide = self._flat_shards if self.shard == "flat" else self._owned_tensors
            parts += divide(copies, {n: w for n, w in weights.items() if n in divided})
        whole = memory.of_weights(w for name, w in weights.items() if name not in divided)
        whole += memory.copies_of(w for name, w in weights.items() if name in divided)
        return ShardBytes(
            whole + sum(memory.of_elements(part.num_elements, part.size) for part in parts),
            sum(part.padding * part.size for part in parts),
        )

    def _copies(self, placement: Placement, rank: int, replica: int | None) -> list[_StageCopies]:
        """Group the stages of a rank by their replicas; a mirrored stage is its own group."""
        plain: list[int] = []
        found: list[_StageCopies] = []
        for stage in placement.stages_of(rank):
            holders = placement.holders(stage)
            if len(holders) == 1:
                plain.append(stage)
                continue
            position = None
            if replica is not None:
                position = replica * len(holders) + holders.index(rank)
            found.append(_StageCopies((stage,), self.replicas * len(holders), position))
        return [*found, _StageCopies(tuple(plain), self.replicas, replica)]

    def _flat_shards(
        self, copies: _StageCopies, weights: Mapping[str, LayerWeight]
    ) -> Iterator[_ShardSize]:
        """Yield this replica's shard of each flat bucket."""
        for bucket in (bucket for stage in copies.stages for bucket in self.buckets[stage]):
            trained = {name: weights[name] for name in bucket if weights[name].is_trained}
            sizes = {name: weight.num_elements for name, weight in trained.items()}
            count = sum(sizes.values())
            if count:
                layout = FlatLayout(sizes, copies.number)
                own = min(layout.shard_elements, count)
                if copies.position is not None:
                    slices = layout.slices(copies.position)
                    own = sum(stop - start for _, start, stop in slices)
                yield _ShardSize(own, _size(list(trained.values())), layout.padded_elements - count)

    def _owned_tensors(
        self, copies: _StageCopies, weights: Mapping[str, LayerWeight]
    ) -> Iterator[_ShardSize]:
        """Yield the tensors that this replica owns, divided separately for each element size."""
        names = {n for stage in copies.stages for bucket in self.buckets[stage] for n in bucket}
        own = {n: w for n, w in weights.items() if n in names and w.is_trained and w.num_elements}
        for size in sorted({_size([weight]) for weight in own.values()}):
            counts = {n: w.num_elements for n, w in own.items() if _size([w]) == size}
            owner = assign_owners(counts, copies.number)
            held: Counter[int] = Counter()
            for name, count in counts.items():
                held[owner[name]] += count
            most = max(held.values())
            yield _ShardSize(most if copies.position is None else held[copies.position], size)


def _size(weights: Sequence[LayerWeight]) -> int:
    """Return the bytes of one element of weights of one dtype."""
    first = next(weight for weight in weights if weight.num_elements)
    return first.nbytes // first.num_elements
