"""Contents of a checkpoint, collected on all ranks before anything is written."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from gpipe_hpc.checkpoint.agreement import all_or_none
from gpipe_hpc.checkpoint.folder import OUTER, model_tensors
from gpipe_hpc.checkpoint.manifest import FORMAT, TYPED, Facts, versions
from gpipe_hpc.checkpoint.options import describe_groups, merge_groups
from gpipe_hpc.checkpoint.parts import StateShard, assemble_states
from gpipe_hpc.checkpoint.rank_reports import Sizes, gather, sizes_of_all
from gpipe_hpc.checkpoint.replica_states import local_sgd_entry, named_by
from gpipe_hpc.checkpoint.states import Split, encode, split

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline

_REMEDY: Final = (
    "convert it, and back after loading: isoformat() for a date, tolist() or numpy() for a tensor"
)


class Contents(NamedTuple):
    """Tensors and manifest entries to write into a checkpoint.

    Args:
        tensors: tensors that this rank writes, by their names in the checkpoint; each is written by
            one rank. They are the model's own tensors, except for optimizer states assembled from
            several ranks, which are on the host.
        facts: the manifest without files and tensors; on the first rank only.
        num_bytes: bytes of the tensors of all ranks.
    """

    tensors: dict[str, Tensor]
    facts: Facts
    num_bytes: int


def collect(pipe: "Pipeline", optimizer: torch.optim.Optimizer | None, extra: object) -> Contents:
    """Collect the tensors and manifest entries of the current state for a checkpoint. Collective.

    Raises CheckpointError on all ranks if a value cannot be saved.
    """
    others = _others_buffers(pipe)
    replica = pipe.replica if pipe.uses_local_sgd else 0
    of_model = replica if pipe.replicas_differ else 0
    held = {
        named_by(of_model, name): tensor
        for name, tensor in model_tensors(pipe).items()
        if name not in others
    }
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        named = {name: each.parameter for name, each in pipe.owned_parameters().items()}
        groups = describe_groups(named.items(), optimizer)
        states, parts = _optimizer_state(pipe, optimizer)
        for own_name, value in states.items():
            name = named_by(replica, own_name)
            if isinstance(value, Tensor):
                held[name] = value
            else:
                values[name] = value
        held |= {OUTER + name: tensor for name, tensor in pipe.outer_state().items()}
        if pipe.is_sharded:
            held |= assemble_states(pipe, parts)
    world_group = pipe.world_group
    first, own = world_group.ranks[0], world_group.position
    written = all_or_none(
        world_group, lambda: _written(pipe, values, extra if pipe.world.rank == first else {})
    )
    held |= written.tensors
    told = gather(pipe, _sizes(held), written.values, groups, written.states)
    facts: Facts = {}
    decided: tuple[dict[str, int], int] | None = None
    if told is not None:
        facts = _facts(
            pipe,
            [each.values for each in told if each.values is not None],
            merge_groups(each.groups or [] for each in told),
            {name: state for each in told for name, state in each.states.items()},
            written.extra,
        )
        total = sum({name: size for each in told for name, size in each.sizes.items()}.values())
        decided = _writers(sizes_of_all(told, pipe.mesh.stages)), total
    writers, num_bytes = world_group.broadcast_object(decided, first)
    return Contents({n: t for n, t in held.items() if writers[n] == own}, facts, num_bytes)


def _optimizer_state(
    pipe: "Pipeline", optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, StateShard]]:
    """Return the optimizer's state of this rank's parameters, named optimizer.<parameter>.<key>.

    Tensors have the shape of the whole parameter; partial ones are returned separately.
    """
    states: dict[str, Any] = {}
    parts: dict[str, StateShard] = {}
    stage_of = {info.name: info.stage for info in pipe.all_parameters}
    for name, held in pipe.owned_parameters().items():
        for key, value in optimizer.state.get(held.parameter, {}).items():
            full = f"optimizer.{name}.{key}"
            if not (isinstance(value, Tensor) and held.is_elementwise(value)):
                states[full] = value
            elif held.is_part:
                parts[full] = StateShard(stage_of[name], name, held, value)
            else:
                states[full] = value.view(held.whole.shape)
    return states, parts


class _EncodedStates(NamedTuple):
    """Encoded JSON values that this rank contributes besides tensors, and tensors of extra states.

    `values` and `extra` are results of `split`.
    """

    values: Split
    extra: Split
    states: dict[str, Any]
    tensors: dict[str, Tensor]


def _written(pipe: "Pipeline", values: Mapping[str, Any], extra: object) -> _EncodedStates:
    return _EncodedStates(
        split_values(values),
        split({} if extra is None else extra, "extra", _REMEDY),
        *_extra_states(pipe),
    )


def split_values(values: Mapping[str, Any]) -> Split:
    """Encode the optimizer's non-tensor values for JSON."""
    remedy = "use an optimizer whose state consists of tensors and such values"
    return split(values, "the optimizer's state", remedy)


def _extra_states(pipe: "Pipeline") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Encode the modules' extra states, for stages of which this rank is the first owner.

    Returns the encoded states by module name, and their tensors.
    """
    states: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for index, stage in pipe.stages.items():
        if not _is_first(pipe, index):
            continue
        for name, module in stage.extra_states().items():
            states[name], own = encode(name, module.get_extra_state())
            tensors |= own
    return states, tensors


def _others_buffers(pipe: "Pipeline") -> set[str]:
    """Return the names of buffers that another rank saves, as the first owner of their stage."""
    return {
        f"model.{name}"
        for index, stage in pipe.stages.items()
        if not (
            _is_first_of_replica(pipe, index) if pipe.replicas_differ else _is_first(pipe, index)
        )
        for name in stage.named_buffers()
    }


def _is_first(pipe: "Pipeline", stage: int) -> bool:
    """Return whether this rank is the first owner of a stage among all ranks."""
    return not pipe.replica and _is_first_of_replica(pipe, stage)


def _is_first_of_replica(pipe: "Pipeline", stage: int) -> bool:
    """Return whether this rank is the first owner of a stage within its replica."""
    return pipe.schedule.placement.holders(stage)[0] == pipe.stage_rank


def _sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _writers(sizes: Iterable[Sizes]) -> dict[str, int]:
    """Assign each tensor to a writer: of the ranks that have it, the one with the fewest bytes."""
    holders: dict[str, list[tuple[int, int]]] = {}
    for position, part in enumerate(sizes):
        for name, size in part.items():
            holders.setdefault(name, []).append((position, size))
    load: Counter[int] = Counter()
    writers = {}
    for name, found in holders.items():
        writer, size = min(found, key=lambda holder: load[holder[0]])
        writers[name] = writer
        load[writer] += size
    return writers


def layout_facts(pipe: "Pipeline") -> dict[str, Any]:
    """Return the manifest's entries about the layout of the run, which are informational only."""
    return {
        "ranks": pipe.world.size,
        "stages": pipe.mesh.stages,
        "replicas": pipe.mesh.replicas,
        "schedule": pipe.schedule.name,
        "microbatches": pipe.num_microbatches,
    }


def _facts(
    pipe: "Pipeline",
    values: Sequence[Split],
    groups: list[dict[str, Any]],
    states: dict[str, Any],
    extra: Split,
) -> Facts:
    typed = {"extra": extra.typed, "values": [item for each in values for item in each.typed]}
    return {
        "format": FORMAT,
        "versions": versions(),
        "steps_done": pipe.steps_done,
        "loss_weight": pipe.loss_weight,
        "loss_scale": None if pipe.loss_scale is None else pipe.loss_scale.state(),
        "parameters": {info.name: info.num_elements for info in pipe.all_parameters},
        "num_layers": pipe.num_layers,
        **layout_facts(pipe),
        "apart": local_sgd_entry(pipe),
        "partition": pipe.partition._asdict(),
        "values": {name: value for each in values for name, value in each.plain.items()},
        "states": states,
        "optimizer": groups,
        "extra": extra.plain,
        **({TYPED: typed} if any(typed.values()) else {}),
    }
