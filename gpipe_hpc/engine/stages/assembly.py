"""From a model and a cut to the stages of one rank, and the proof that nothing was lost."""

import copy
from collections.abc import Mapping, Sequence
from operator import add
from typing import NamedTuple

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import ControlGroup, Group
from gpipe_hpc.comm.collectives.packed import broadcast_packed
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.data_parallel import GradientBuckets, choose_strategy
from gpipe_hpc.engine.buffer_sync import copy_of, plain_buffers, take_over
from gpipe_hpc.engine.stages.routes import stage_routes
from gpipe_hpc.engine.stages.stage import Stage
from gpipe_hpc.models import (
    Layer,
    Tie,
    build_layer,
    find_skips,
    find_ties,
    parameter_at,
    refuse_shared_statistics,
    replace_parameter,
    skip_names,
    stage_layers,
)
from gpipe_hpc.schedule import Placement
from gpipe_hpc.settings import Outer


class ParameterInfo(NamedTuple):
    """Facts about a parameter that every rank knows."""

    name: str
    stage: int
    num_elements: int
    is_double: bool = False


def build_stages(
    layers: Sequence[Layer],
    counts: Sequence[int],
    indices: Sequence[int],
    seed: int,
    world: World,
    everybody: ControlGroup,
    precision: str = "float32",
    recomputed: Sequence[frozenset[int]] | None = None,
    built_on_device: bool = False,
) -> dict[int, Stage]:
    """Build the stages `indices` of a model that is cut into stages of `counts` layers.

    `recomputed`: the layers of each stage that an ``R`` runs again; None for all.
    `built_on_device`: build each `LayerSpec` on the world's device instead of the CPU.

    The same call on every rank. Layers that come built are trained themselves, except on ranks
    that find the same object trained by a rank ahead of them: those work on copies.
    """
    spans = stage_layers(counts)
    refuse_shared_statistics(layers)
    ties = find_ties(layers)
    routes = stage_routes(find_skips(layers), counts)
    held = [i for stage in indices for i in spans[stage]]
    # Built layers may share whole modules with layers of other ranks, and ranks may be threads
    # of one process: whoever does not hold the first place works on a copy.
    apart = {i for tie in ties for i, _ in tie.places if tie.places[0][0] not in held}
    if world.is_one_process:
        apart |= _taken(layers, held, everybody)
    # In one go: what two of them share, registered or not, stays shared.
    copies = copy.deepcopy({i: layers[i] for i in held if i in apart})
    modules = {
        i: build_layer(
            copies[i] if i in apart else layers[i],
            index=i,
            seed=seed,
            device=world.device,
            on_device=built_on_device,
        )
        for i in held
    }
    for tie in ties:
        _share(tie, modules)
    elsewhere = _buffers_elsewhere(layers, spans)
    return {
        index: Stage(
            index,
            {i: modules[i] for i in spans[index]},
            world.device,
            routes[index],
            names=dict(enumerate(map(skip_names, layers))),
            ties=ties,
            precision=precision,
            recomputed=None if recomputed is None else recomputed[index],
            elsewhere=elsewhere,
        )
        for index in indices
    }


def _buffers_elsewhere(
    layers: Sequence[Layer], spans: Sequence[range]
) -> dict[int, dict[str, int]]:
    """Return, for each layer, which buffers a layer of another stage has too, with that layer."""
    stages = {index: stage for stage, span in enumerate(spans) for index in span}
    holders: dict[int, dict[int, int]] = {}  # by memory: the first layer of each stage
    found: dict[int, dict[str, int]] = {}
    named = [
        (index, name, _memory(buffer))
        for index, layer in enumerate(layers)
        if isinstance(layer, nn.Module)
        for name, buffer in layer.named_buffers(remove_duplicate=False)
    ]
    for index, _, memory in named:
        holders.setdefault(memory, {}).setdefault(stages[index], index)
    for index, name, memory in named:
        others = [other for stage, other in holders[memory].items() if stage != stages[index]]
        if others:
            found.setdefault(index, {})[name] = others[0]
    return found


def _memory(tensor: torch.Tensor) -> int:
    """Return a key for the memory of a tensor; its id if it has no memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _taken(layers: Sequence[Layer], held: Sequence[int], everybody: ControlGroup) -> set[int]:
    """Return which built layers of this rank an earlier rank, a thread of this process, trains."""
    built = {i: id(layers[i]) for i in held if isinstance(layers[i], nn.Module)}
    claims = everybody.all_gather_object(set(built.values()))
    taken = {each for ids in claims[: everybody.position] for each in ids}
    return {i for i, each in built.items() if each in taken}


def _share(tie: Tie, modules: Mapping[int, nn.Module]) -> None:
    """Make all places of a tie on this rank one parameter."""
    places = [place for place in tie.places if place[0] in modules]
    for layer, name in places:
        first = parameter_at(modules[places[0][0]], places[0][1], f"layers.{places[0][0]}")
        replace_parameter(modules[layer], name, first)


def gather_parameters(
    stages: dict[int, Stage], pipeline: ControlGroup
) -> tuple[ParameterInfo, ...]:
    """Return all parameters of the model in global order, each once, the same on every rank."""
    own = [
        (stage.index, position, _info(name, stage.index, parameter))
        for stage in stages.values()
        for position, (name, parameter) in enumerate(stage.named_parameters().items())
        if stage.owns(name)
    ]
    return tuple(info for _, _, info in sorted(set(pipeline.merge_object(own, add))))


def _info(name: str, stage: int, parameter: nn.Parameter) -> ParameterInfo:
    is_double = parameter.dtype == torch.float64
    return ParameterInfo(name, stage, parameter.numel(), is_double)


def by_stage(parameters: Sequence[ParameterInfo]) -> list[dict[str, int]]:
    """Return the number of elements of each stage's parameters, by name."""
    stages: dict[int, dict[str, int]] = {}
    for info in parameters:
        stages.setdefault(info.stage, {})[info.name] = info.num_elements
    return [stages[stage] for stage in sorted(stages)]


def equalise_copies(stages: Mapping[int, Stage], copies: Mapping[int, Group]) -> None:
    """Copy parameters and buffers of each stage from replica 0 to all other replicas.

    Stages with the same holders go together, packed into few broadcasts.
    """
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(stages):
        by_ranks.setdefault(copies[index].ranks, []).append(index)
    for ranks, indices in by_ranks.items():
        _equalise([stages[index] for index in indices], copies[indices[0]], ranks[0])


def _equalise(stages: Sequence[Stage], group: Group, root: int) -> None:
    if group.size == 1:
        return
    parameters = [p.data for stage in stages for p in stage.named_parameters().values()]
    places = [place for stage in stages for place in plain_buffers(stage.layers)]
    values = [copy_of(place) for place in places]
    with torch.no_grad():
        broadcast_packed(group, [*parameters, *values], root)
    for place, value in zip(places, values, strict=True):
        take_over(place, value)


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
