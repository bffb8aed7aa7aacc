"""Names of tensors in checkpoints of local SGD, whose replicas differ, and which replicas to load.

States of replica 0 have the usual names; those of replica r are named ``replica<r>.<name>``. This
applies to the optimizer's state, and between two outer steps also to parameters and buffers. A run
with the same number of replicas restores each of them. Another run uses the mean of the parameters
and floating-point buffers; its replica r uses the optimizer's state of replica r modulo the stored
number of replicas.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gpipe_hpc.checkpoint.manifest import Facts

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


def named_by(replica: int, name: str) -> str:
    """Return the name under which a replica's tensor is stored."""
    return f"replica{replica}.{name}" if replica else name


def local_sgd_entry(pipe: "Pipeline") -> dict[str, Any] | None:
    """Return the manifest's entry about local SGD; None if the run does not use it."""
    if not pipe.uses_local_sgd:
        return None
    return {"replicas": pipe.mesh.replicas, "differ": pipe.replicas_differ}


@dataclass(frozen=True)
class ReplicaSources:
    """The replicas whose tensors one rank reads from a checkpoint.

    Args:
        replica: the replica whose optimizer state is read, and whose model if `is_own`.
        is_own: whether the model is read from that replica alone.
        averaged: number of replicas over whose models the mean is taken; 1 if they were equal.
    """

    replica: int = 0
    is_own: bool = False
    averaged: int = 1

    @classmethod
    def of(cls, pipe: "Pipeline", facts: Facts) -> "ReplicaSources":
        """Determine the replicas from which this rank reads, given the manifest of a checkpoint."""
        apart = facts.get("apart")
        if apart is None:
            return cls()
        count, differ = int(apart["replicas"]), bool(apart["differ"])
        if pipe.uses_local_sgd and pipe.mesh.replicas == count:
            return cls(pipe.replica, is_own=differ)
        return cls(
            pipe.replica % count if pipe.uses_local_sgd else 0, averaged=count if differ else 1
        )

    def of_model(self, name: str) -> str:
        """Return the stored name of a parameter or buffer."""
        return named_by(self.replica, name) if self.is_own else name

    def of_optimizer(self, name: str) -> str:
        """Return the stored name of an optimizer state."""
        return named_by(self.replica, name)

    def others(self, name: str) -> list[str]:
        """Return the stored names of the other replicas' values that are averaged with `name`."""
        return [named_by(replica, name) for replica in range(1, self.averaged)]


def average(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor], reading: ReplicaSources
) -> None:
    """Replace tensors of replica 0 in `targets` by the mean over replicas, added in replica order.

    `values` contains the tensors of the other replicas, by their stored names.
    """
    for name, target in targets.items():
        others = [values[other] for other in reading.others(name)]
        if others and (target.is_floating_point() or target.is_complex()):
            total = target.to(others[0]) if target.itemsize >= 4 else target.float()
            for other in others:
                total = total + other
            target.copy_(total / reading.averaged)
