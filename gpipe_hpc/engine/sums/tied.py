"""A tied parameter on one rank: its gradient is summed over all that hold it."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gpipe_hpc.comm.group import Group
from gpipe_hpc.comm.mesh import Mesh
from gpipe_hpc.comm.packed import broadcast_packed
from gpipe_hpc.comm.world import World
from gpipe_hpc.engine.outer.bucket import Bucket
from gpipe_hpc.engine.outer.settings import Outer
from gpipe_hpc.engine.outer.ways import way_of_tie
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.engine.sums.dividing import Divisor
from gpipe_hpc.models import Tie
from gpipe_hpc.schedule import Placement


class TiedParameter:
    """One parameter with places on several stages, maybe of several ranks.

    Stages of one rank share the object. `copies`: every rank, of every replica, that holds it.
    `group`: those over which its gradients are summed; where replicas train apart, of its replica
    alone. Its reduction is not overlapped: its last contribution comes with the end of the step.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, group: Group, copies: Group, outer: Outer
    ) -> None:
        self.name, self.copies, self.group = name, copies, group
        self._parameter = parameter
        self._bucket = Bucket({name: parameter})
        self._way = way_of_tie(outer, group)
        self._is_agreed = self._is_held = False

    def adopt(self) -> None:
        """Begin to sum it, or leave it alone, as all that hold it train it or not."""
        self._is_agreed = self._parameter.requires_grad

    def clear(self) -> None:
        """Begin a step."""
        self._is_held = self._is_agreed or self._parameter.requires_grad
        if self._is_held:
            self._bucket.clear()
        else:
            self._parameter.grad = None

    def start_reduction(self) -> None:
        """Start summing over all holders; the step's last backward is done."""
        if self._is_agreed:
            self._bucket.start_reduction(self._way)
        elif self._is_held:
            self._bucket.take_in()

    def start_late(self) -> None:
        """Start what had to wait until all holders had said that they have unfrozen it."""
        if self._is_held and not self._is_agreed:
            self._bucket.start_reduction(self._way)

    @property
    def is_used(self) -> bool:
        """Say whether a micro-batch of this rank has used it; known once its sum was started."""
        return self._is_held and self._bucket.used()[0]

    def wait(self) -> None:
        """Return when the sum is there."""
        self._bucket.wait()

    def finish(self, divisor: Divisor, *, is_used: bool) -> None:
        """Finish the sum and divide it; `is_used`: by any rank."""
        if self._is_held:
            self._bucket.finish(divisor, [is_used])

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter."""
        return self._parameter

    @property
    def value(self) -> torch.Tensor:
        """Return what the parameter holds, apart from any graph."""
        return self._parameter.data


def join_ties(
    ties: Sequence[Tie],
    stages: Mapping[int, Stage],
    stage_of_layer: Sequence[int],
    placement: Placement,
    mesh: Mesh,
    world: World,
    outer: Outer,
    *,
    is_apart: bool = False,
) -> list[TiedParameter]:
    """Form the groups of the ties and make their copies equal; the same call on every rank.

    Ties of the same ranks share a group. `is_apart`: replicas train by themselves. Returns those
    that this rank holds.
    """
    joined = []
    copies: dict[tuple[Group, int], list[torch.Tensor]] = {}
    groups: dict[tuple[int, ...], Group] = {}

    def group_of(ranks: Sequence[int]) -> Group:
        members = tuple(ranks)
        if members not in groups:
            groups[members] = world.group([members])
        return groups[members]

    for tie in ties:
        places = sorted({stage_of_layer[layer] for layer, _ in tie.places})
        holders = sorted({rank for stage in places for rank in placement.holders(stage)})
        ranks = [mesh.world_rank(r, k) for r in range(mesh.replicas) for k in holders]
        if world.rank not in ranks:
            continue
        everybody = group = group_of(ranks)
        if is_apart:
            replica = mesh.replica_of(world.rank)
            group = group_of([mesh.world_rank(replica, k) for k in holders])
        held = next(stage for index, stage in stages.items() if index in places)
        tied = TiedParameter(tie.name, held.tied[tie.name], group, everybody, outer)
        root = mesh.world_rank(0, placement.holders(stage_of_layer[tie.places[0][0]])[0])
        joined.append(tied)
        copies.setdefault((everybody, root), []).append(tied.value)
    for (everybody, root), values in copies.items():
        with torch.no_grad():
            broadcast_packed(everybody, values, root)
    return joined
