"""Build, equalise and compile the stages of one rank, from a model and a partition."""

import copy
import importlib.util
import inspect
import os
import shutil
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from gpipe_hpc.comm.collectives.group import ControlGroup, Group
from gpipe_hpc.comm.collectives.packed import broadcast_packed
from gpipe_hpc.comm.world.mesh import Mesh
from gpipe_hpc.comm.world.world import World
from gpipe_hpc.data_parallel import GradientBuckets, choose_strategy
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.buffer_sync import copy_of, plain_buffers, take_over
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.engine.wiring import stage_routes
from gpipe_hpc.errors import ConfigError
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

_INDUCTOR: Final = "inductor"
# With and without gradients, in training and evaluation, with static sizes, dynamic ones, and 1.
_MAX_VARIANTS: Final = 64


class ParameterInfo(NamedTuple):
    """Properties of one parameter of the model, known to every rank."""

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
    world_group: ControlGroup,
    precision: str,
    recomputed: Sequence[frozenset[int]] | None,
    *,
    built_on_device: bool,
) -> dict[int, Stage]:
    """Build the stages `indices` of a model; a collective call.

    Layers that are built modules are trained themselves, except if an earlier rank of this process
    trains the same object: then this rank trains a copy.

    Args:
        layers: All layers of the model.
        counts: The number of layers of each stage.
        indices: The stages of this rank.
        seed: Initial weights of a `LayerSpec` depend on it and on the layer's index.
        world: The ranks of the run.
        world_group: The group of all ranks.
        precision: The precision of forwards.
        recomputed: For each stage the layers that an ``R`` runs again; None for all.
        built_on_device: Build each `LayerSpec` on the world's device instead of the CPU.
    """
    spans = stage_layers(counts)
    refuse_shared_statistics(layers)
    ties = find_ties(layers)
    routes = stage_routes(find_skips(layers), counts)
    held = [i for stage in indices for i in spans[stage]]
    # Built layers may share whole modules with layers of other ranks, and ranks may be threads
    # of one process: a rank that does not hold the first place trains a copy.
    apart = {i for tie in ties for i, _ in tie.places if tie.places[0][0] not in held}
    if world.is_one_process:
        apart |= _taken(layers, held, world_group)
    # Copied together, so that objects that two of them share stay shared, registered or not.
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
    """Return for each layer its buffers that a layer of another stage shares, and that layer."""
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


def _taken(layers: Sequence[Layer], held: Sequence[int], world_group: ControlGroup) -> set[int]:
    """Return the built layers of this rank that an earlier rank of this process trains."""
    built = {i: id(layers[i]) for i in held if isinstance(layers[i], nn.Module)}
    claims = world_group.all_gather_object(set(built.values()))
    taken = {each for ids in claims[: world_group.position] for each in ids}
    return {i for i, each in built.items() if each in taken}


def _share(tie: Tie, modules: Mapping[int, nn.Module]) -> None:
    """Register one parameter in all places of a tie on this rank."""
    places = [place for place in tie.places if place[0] in modules]
    for layer, name in places:
        first = parameter_at(modules[places[0][0]], places[0][1], f"layers.{places[0][0]}")
        replace_parameter(modules[layer], name, first)


def gather_parameters(
    stages: dict[int, Stage], pipeline: ControlGroup
) -> tuple[ParameterInfo, ...]:
    """Return all parameters of the model in global order, each once, the same on every rank."""
    own = [
        (
            stage.index,
            position,
            ParameterInfo(name, stage.index, parameter.numel(), parameter.dtype == torch.float64),
        )
        for stage in stages.values()
        for position, (name, parameter) in enumerate(stage.named_parameters().items())
        if stage.owns(name)
    ]
    return tuple(info for _, _, info in sorted(set(pipeline.merge_object(own, add))))


def equalise_copies(stages: Mapping[int, Stage], copies: Mapping[int, Group]) -> None:
    """Copy parameters and buffers of each stage from replica 0 to all other replicas.

    Stages with the same ranks are packed into few broadcasts.
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
    """A parameter that several stages use, perhaps on several ranks.

    Args:
        name: The global name of its first place.
        parameter: The parameter; one object for all stages of this rank.
        gradients: Its gradient, reduced at the end of a step, after all stages have added to it.
        copies: All ranks of all replicas that hold it.
        group: The ranks over which its gradients are summed: `copies`, or with local SGD those of
            this replica.
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
    uses_local_sgd: bool,
) -> list[TiedParameter]:
    """Make the copies of tied parameters equal, and return those of this rank; a collective call.

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


def chosen_backend(wish: bool | str, device: Device) -> str | None:
    """Return the torch.compile backend for the setting `compile`; None for no compilation.

    Raises ConfigError for a backend that torch does not know, or whose compiler is missing.
    """
    if wish is False:
        return None
    backend = _INDUCTOR if wish is True else wish
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join([*torch.compiler.list_backends(), "aot_eager", "eager"])
        raise ConfigError(
            f"compile: unknown backend, expected true, false or one of {known}, got {wish!r}; "
            f"choose one of them"
        )
    if backend == _INDUCTOR:
        _require_compiler(device)
    return backend


def compile_layers(layers: Mapping[int, nn.Module], backend: str) -> dict[int, Callable[..., Any]]:
    """Return a compiled call for each layer of a rank; compilation happens in the first call.

    Each layer is compiled by itself, and layers of the same kind share the compiled code, in all
    stages. The layers, their parameters and names do not change. Random numbers are those of
    uncompiled layers, so a dropout mask is the same in F and R.
    """
    kinds: dict[Hashable, Callable[..., Any]] = {}
    calls: dict[int, Callable[..., Any]] = {}
    for index, layer in layers.items():
        kind = _kind(layer)
        if kind not in kinds:
            kinds[kind] = _compiled(f"layers_{index}", backend)
        calls[index] = partial(kinds[kind], layer)
    return calls


def _kind(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers that are likely to compile to the same code."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (
        type(layer),
        repr(layer),
        tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors),
    )


def _compiled(name: str, backend: str) -> Callable[..., Any]:
    # torch counts variants by code object, so each kind of layer gets a code object of its own.
    code = _call.__code__.replace(co_name=name)
    function = types.FunctionType(code, _call.__globals__, name)
    options: dict[str, Any] = {}
    if backend == _INDUCTOR:
        options["options"] = {"fallback_random": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _MAX_VARIANTS
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, **options)
    return compiled


def _call(layer: nn.Module, *args: Any) -> Any:
    return layer(*args)


def _require_compiler(device: Device) -> None:
    if device.is_accelerator:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                "compile: Triton, which generates GPU code, is not installed; pip install triton, "
                "or compile=false"
            )
        return
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(shutil.which(name.split()[0]) for name in wanted):
        raise ConfigError(
            f"compile: no C++ compiler found (searched for {', '.join(wanted)}); install g++, set "
            f"CXX, or compile=false"
        )
