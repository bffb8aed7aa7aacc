"""How the states of replicas that train apart lie in one checkpoint, and who reads which.

Replica 0's have the names that every checkpoint has; those of replica r are called
``replica<r>.<name>``: always what the optimizer keeps, and between two outer steps parameters and
buffers. A run with as many replicas goes on from all of them. Another one takes the mean of the
parameters and floating buffers, and the optimizer's state of replica ``r modulo their number``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gpipe_hpc.checkpoint.manifest import Facts

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


def named_by(replica: int, name: str) -> str:
    """Return under which name a replica's own is kept."""
    return f"replica{replica}.{name}" if replica else name


def described(pipe: "Pipeline") -> dict[str, Any] | None:
    """Return what the manifest says of replicas that train apart; None if they do not."""
    if not pipe.uses_local_sgd:
        return None
    return {"replicas": pipe.mesh.replicas, "differ": pipe.replicas_differ}


@dataclass(frozen=True)
class Reading:
    """What one rank reads of a checkpoint.

    `replica`: whose state of the optimizer; of the model, too, if `is_own`. `averaged`: of how many
    replicas the model is the mean; 1: they were alike.
    """

    replica: int = 0
    is_own: bool = False
    averaged: int = 1

    @classmethod
    def of(cls, pipe: "Pipeline", facts: Facts) -> "Reading":
        """Return what this rank reads of a checkpoint with these facts."""
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
        """Return under which name a parameter or buffer is read in its place."""
        return named_by(self.replica, name) if self.is_own else name

    def of_optimizer(self, name: str) -> str:
        """Return under which name a state of the optimizer is read."""
        return named_by(self.replica, name)

    def others(self, name: str) -> list[str]:
        """Return the names of the other replicas' values that `name` is averaged with."""
        return [named_by(replica, name) for replica in range(1, self.averaged)]


def average(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], reading: Reading) -> None:
    """Put the mean over the replicas in the place of replica 0's, in the order of replicas."""
    for name, target in targets.items():
        others = [values[other] for other in reading.others(name)]
        if others and (target.is_floating_point() or target.is_complex()):
            total = target.to(others[0]) if target.itemsize >= 4 else target.float()
            for other in others:
                total = total + other
            target.copy_(total / reading.averaged)
