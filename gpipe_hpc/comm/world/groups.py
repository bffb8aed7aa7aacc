"""The process groups of a rank in the (dp, pp) mesh, and checks made when they are formed."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpipe_hpc.comm.collectives.group import ControlGroup, Group, SoloGroup
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError


@dataclass(frozen=True)
class RankContext:
    """The position of a rank in the mesh and the groups that it is in.

    Args:
        world: all ranks.
        mesh: the mesh of replicas and stages.
        world_group: group of all ranks.
        pipeline: group of the ranks of this rank's pipeline.
        dp_group: group of the ranks with the same position in all pipelines.
    """

    world: World
    mesh: Mesh
    world_group: ControlGroup
    pipeline: ControlGroup
    dp_group: ControlGroup

    @classmethod
    def of(cls, world: World, mesh: Mesh) -> "RankContext":
        """Form the groups of this rank; a collective call.

        If there is a single pipeline, its group is the group of all ranks, because each group costs
        a thread that wakes up 100 times a second (Gloo) or buffers (NCCL).
        """
        world_group = world.control_group([range(world.size)])
        if mesh.replicas == 1:
            return cls(world, mesh, world_group, world_group, SoloGroup(world.rank))
        pipeline = world.control_group([mesh.pipeline_ranks(mesh.replica_of(world.rank))])
        dp_group = world.control_group([mesh.replica_ranks(k) for k in range(mesh.stages)])
        return cls(world, mesh, world_group, pipeline, dp_group)

    @property
    def replica(self) -> int:
        """Return the replica of this rank."""
        return self.mesh.replica_of(self.world.rank)

    @property
    def stage_rank(self) -> int:
        """Return the position of this rank in its pipeline."""
        return self.mesh.stage_rank_of(self.world.rank)


def warm_up_groups(groups: Sequence[ControlGroup | Group], device: Device) -> None:
    """Run an all-reduce in each group if the ranks use an accelerator; a collective call.

    The first all-reduce creates the communicator, which takes seconds and memory and should not
    happen in a forward. It also checks that the backend sums the dtypes of a training step: losses
    and norms in float64, most gradients in float32.
    """
    if not device.is_accelerator:
        return
    for group in {id(group): group for group in groups}.values():
        if group.size > 1:
            for dtype in (torch.float32, torch.float64):
                group.all_reduce(torch.zeros(1, dtype=dtype, device=device.torch))


def check_agreement(world: ControlGroup, facts: dict[str, object]) -> None:
    """Raise ConfigError, on every rank, if a fact has different values on different ranks.

    `facts` maps names, such as a setting's, to values. Facts that only some ranks know are compared
    among these.
    """
    rank, host = world.ranks[world.position], socket.gethostname()
    own = {name: (rank, host, value) for name, value in facts.items()}
    _, difference = world.merge_object((own, ""), _merge_facts)
    if difference:
        raise ConfigError(f"start: {difference}; start all ranks with one configuration")


_Claims = dict[str, tuple[int, str, object]]
"""For each fact, the first rank that knows it, that rank's host, and the value."""


def _merge_facts(ahead: tuple[_Claims, str], behind: tuple[_Claims, str]) -> tuple[_Claims, str]:
    """Merge the facts of lower and higher ranks; return them and the first difference."""
    known, difference = dict(ahead[0]), ahead[1]
    for name, (rank, host, value) in behind[0].items():
        known_by, home, first = known.setdefault(name, (rank, host, value))
        if value != first and not difference:
            where = f"both on {host}" if host == home else f"on {home} and {host}"
            difference = (
                f"expected the same {name} on every rank, got {first} on rank {known_by} and "
                f"{value} on rank {rank}, {where}"
            )
    return known, difference or behind[1]
