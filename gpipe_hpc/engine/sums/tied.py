"""Tied parameters: one parameter that layers of several stages use."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import Group
from gpipe_hpc.comm.collectives.packed import broadcast_packed
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.data_parallel import GradientBuckets, choose_strategy
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.models import Tie
from gpipe_hpc.schedule import Placement
from gpipe_hpc.settings import Outer


class TiedParameter(NamedTuple):
    """A parameter of several stages, perhaps of several ranks. Stages of one rank share the object.

    `gradients`: its gradient, summed at the end of a step, when all stages have added to it.
    `copies`: every rank, of every replica, that holds it. `group`: the ranks over which its
    gradients are summed: with local SGD those of this replica alone, else `copies`.
    """

    name: str
    parameter: nn.Parameter
    gradients: GradientBuckets
    copies: Group
    group: Group


def join_ties(
    ties: Sequence[Tie],
    stages: Mapping[int, Stage],
    stage_of_layer: Sequence[int],
    placement: Placement,
    mesh: Mesh,
    world: World,
    outer: Outer,
    *,
    uses_local_sgd: bool = False,
) -> list[TiedParameter]:
    """Return this rank's tied parameters, whose copies are made equal; all ranks call it.

    Ties of the same ranks share a group.
    """
    found = []
    values: dict[tuple[Group, int], list[torch.Tensor]] = {}
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
        copies = group = group_of(ranks)
        if uses_local_sgd:
            replica = mesh.replica_of(world.rank)
            group = group_of([mesh.world_rank(replica, k) for k in holders])
        stage = next(stage for index, stage in stages.items() if index in places)
        parameter = stage.tied[tie.name]
        # In flat memory even on one rank: stages copy shared gradients of their own parameters.
        gradients = GradientBuckets({tie.name: parameter}, stage.device, is_flat=True)
        gradients.reduce_by(choose_strategy(outer, group, is_tied=True))
        found.append(TiedParameter(tie.name, parameter, gradients, copies, group))
        root = mesh.world_rank(0, placement.holders(stage_of_layer[tie.places[0][0]])[0])
        values.setdefault((copies, root), []).append(parameter.data)
    for (copies, root), tensors in values.items():
        with torch.no_grad():
            broadcast_packed(copies, tensors, root)
    return found
