"""From a model and a cut to the stages of one rank, and the proof that nothing was lost."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gpipe_hpc.comm.group import Group
from gpipe_hpc.engine.stage import Stage
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.models import Layer, build_layer


class ParameterInfo(NamedTuple):
    """A parameter as every rank knows it."""

    name: str
    stage: int
    num_elements: int


def build_stages(
    layers: Sequence[Layer],
    counts: Sequence[int],
    indices: Sequence[int],
    seed: int,
    device: torch.device,
) -> dict[int, Stage]:
    """Build the stages `indices` of a model cut into stages of `counts` layers; nothing else."""
    stages = {}
    for index in indices:
        first = sum(counts[:index])
        modules = {
            i: build_layer(layers[i], index=i, seed=seed, device=device)
            for i in range(first, first + counts[index])
        }
        stages[index] = Stage(index, modules, device)
    return stages


def gather_parameters(stages: dict[int, Stage], pipeline: Group) -> tuple[ParameterInfo, ...]:
    """Return all parameters of the model in global order, each once, the same on every rank."""
    own = [
        (stage.index, position, ParameterInfo(name, stage.index, parameter.numel()))
        for stage in stages.values()
        for position, (name, parameter) in enumerate(stage.named_parameters().items())
    ]
    everybody = sorted({entry for part in pipeline.all_gather_object(own) for entry in part})
    return tuple(info for _, _, info in everybody)


def by_stage(parameters: Sequence[ParameterInfo]) -> list[dict[str, int]]:
    """Return the number of elements of each stage's parameters, by name."""
    stages: dict[int, dict[str, int]] = {}
    for info in parameters:
        stages.setdefault(info.stage, {})[info.name] = info.num_elements
    return [stages[stage] for stage in sorted(stages)]


def check_agreement(world: Group, facts: dict[str, object]) -> None:
    """Raise ConfigError, on every rank, if ranks were started with different facts."""
    everybody = world.all_gather_object(facts)
    for rank, theirs in zip(world.ranks, everybody, strict=True):
        for name, value in everybody[0].items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"start: expected the same {name} on every rank, got {value} on rank 0 and "
                    f"{theirs.get(name)} on rank {rank}; start all ranks with one configuration"
                )


def equalise_copies(stages: Mapping[int, Stage], copies: Mapping[int, Group]) -> None:
    """Give every copy of a stage the parameters and buffers of its first: that of replica 0."""
    with torch.no_grad():
        for index, stage in sorted(stages.items()):
            group = copies[index]
            for parameter in stage.named_parameters().values():
                group.broadcast(parameter.data, root=group.ranks[0])
            for buffer in stage.named_buffers().values():
                group.broadcast(buffer, root=group.ranks[0])
