"""`recompute=budget`: the least recomputation with which every rank stays within its memory.

Each stage has its `Choices`; what a rank holds while it runs an action is a sum over its stages:
so many micro-batches of which the kept part lives, and so many of which everything does. Ranks
that hold a stage in common are solved together, all others one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from gpipe_hpc.errors import PartitionError
from gpipe_hpc.models import Layer
from gpipe_hpc.planning.choice import Example, Partition
from gpipe_hpc.planning.choices import Choices, stage_choices
from gpipe_hpc.planning.counted import ModelCount, count_model
from gpipe_hpc.planning.forecast import rank_states
from gpipe_hpc.planning.selection import Limit, select
from gpipe_hpc.planning.stages import StageCount, count_stages
from gpipe_hpc.planning.storages import StageStorages
from gpipe_hpc.planning.units import bytes_text, flops_text, ranges_text
from gpipe_hpc.schedule import Action, Op, Placement, Schedule, add_recompute

_PER_SECOND: Final = 10**12  # measured seconds as integers, so that sums are exact


@dataclass(frozen=True)
class Budget:
    """What each stage recomputes: layers by their index; and the bare table with those R."""

    recomputed: tuple[frozenset[int], ...]
    schedule: Schedule
    text: str


def fit_recompute(
    layers: Sequence[Layer],
    partition: Partition,
    schedule: Schedule,
    example: Example,
    *,
    limit_bytes: float,
    optimizer_states: int,
    precision: str = "float32",
) -> Budget:
    """Choose for a pipeline: see `choose_recompute`. Of the example, shapes and loss count.

    Where the partition was measured, measured seconds decide instead of counted FLOPs. Allocates
    nothing, takes seconds, and gives the same on every rank that asks.
    """
    model = count_model(
        layers,
        example.inputs,
        example.targets,
        example.loss_fn,
        device_type=example.device.type,
        precision=precision,
    )
    seconds = [forward for forward, _ in partition.seconds]
    return choose_recompute(
        model, partition.counts, schedule, limit_bytes, optimizer_states, seconds
    )


def choose_recompute(
    model: ModelCount,
    counts: Sequence[int],
    schedule: Schedule,
    limit_bytes: float,
    optimizer_states: int,
    seconds: Sequence[float] = (),
) -> Budget:
    """Choose the layers to recompute, so that no rank's weights and activations exceed a limit.

    `schedule` is bare, without R; `optimizer_states` is how many numbers the optimizer keeps for
    each parameter; `seconds` are those of the forward of each layer, where they were measured.
    Chosen is the least sum over all R of a step: of the seconds, or of the FLOPs and one more for
    each byte that a layer gives, so that what has no FLOPs is not for nothing. It is exact for the
    memory that `forecast` foresees, but for a stage or rank with thousands of choices.

    Raises PartitionError, naming the ranks and what they lack, where nothing fits.
    """
    stages = count_stages(model, counts)
    table = add_recompute(schedule, "except_last")
    choices = _choices_of(stages, _layer_costs(model, stages, seconds))
    limits = _limits(model, stages, table, limit_bytes, optimizer_states)
    _check_feasible(limits, choices, limit_bytes)
    runs = [0] * len(stages)
    for row in table.ranks:
        for action in row:
            runs[action.stage] += action.op is Op.R
    chosen: list[frozenset[int]] = [frozenset()] * len(stages)
    for group in _groups(table.placement):
        picked = select(
            {stage: choices[stage] for stage in group},
            {stage: runs[stage] for stage in group},
            [limit for limit in limits if set(limit.kept) & set(group)],
        )
        for stage, choice in picked.items():
            places = choices[stage].recomputed(choice)
            chosen[stage] = frozenset(stages[stage].layers[place] for place in places)
    text = _text(stages, chosen, seconds)
    return Budget(tuple(chosen), _without_idle(table, chosen), text)


def _without_idle(table: Schedule, chosen: Sequence[frozenset[int]]) -> Schedule:
    """Return the table without the R of stages that recompute nothing."""
    rows = (tuple(a for a in row if a.op is not Op.R or chosen[a.stage]) for row in table.ranks)
    return replace(table, ranks=tuple(rows))


def _layer_costs(
    model: ModelCount, stages: Sequence[StageCount], seconds: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return what running each layer of each stage again costs, as integers."""
    if seconds:
        return [tuple(round(_PER_SECOND * seconds[i]) for i in stage.layers) for stage in stages]
    written = [
        sum(nbytes for each in (count.output, *count.stashed) for nbytes in each.tensors)
        for count in model.layers
    ]
    return [
        tuple(
            flops + written[index]
            for flops, index in zip(stage.forward_costs, stage.layers, strict=False)
        )
        for stage in stages
    ]


def _choices_of(stages: Sequence[StageCount], costs: Sequence[tuple[int, ...]]) -> list[Choices]:
    """Return the choices of each stage; equal stages are solved once."""
    known: dict[tuple[StageStorages, tuple[int, ...]], Choices] = {}
    found: list[Choices] = []
    for stage, own in zip(stages, costs, strict=True):
        # A stage without layers has nothing to recompute, and holds on to what it is given.
        key = (stage.storages if stage.layers else _solid(stage)), own
        if key not in known:
            known[key] = stage_choices(*key)
        found.append(known[key])
    return found


def _solid(stage: StageCount) -> StageStorages:
    return StageStorages((stage.activation_bytes,), frozenset({0}), ())


def _limits(
    model: ModelCount,
    stages: Sequence[StageCount],
    table: Schedule,
    limit_bytes: float,
    optimizer_states: int,
) -> list[Limit]:
    """Return what the stages of each rank may keep, at each time that may be its fullest."""
    limits: list[Limit] = []
    for rank, row in enumerate(table.ranks):
        states = rank_states(model, stages, table.placement, rank, optimizer_states)
        for moment in _moments(row):
            full = sum(moment.full[s] * stages[s].activation_bytes for s in moment.full)
            limits.append(Limit(rank, moment.kept, limit_bytes - states.total_bytes - full))
    return limits


class _Moment(NamedTuple):
    """How many micro-batches of each stage live on a rank at some time."""

    kept: Mapping[int, int]  # of which only what a recomputation needs
    full: Mapping[int, int]  # of which everything

    def covers(self, other: "_Moment") -> bool:
        """Say whether at least as much lives as at another time, whatever is kept."""
        return all(self._at_least(other, stage) for stage in other.kept)

    def _at_least(self, other: "_Moment", stage: int) -> bool:
        more_full = self.full[stage] - other.full[stage]
        return more_full >= 0 and more_full + self.kept[stage] - other.kept[stage] >= 0


def _moments(row: Sequence[Action]) -> list[_Moment]:
    """Return the times of a rank's list at which it may hold most."""
    again = {(a.stage, a.microbatch) for a in row if a.op is Op.R}
    zero = dict.fromkeys(sorted({a.stage for a in row}), 0)
    kept, full = dict(zero), dict(zero)
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], _Moment] = {}
    for action in row:
        stage = action.stage
        if action.op is Op.F:
            (kept if (stage, action.microbatch) in again else full)[stage] += 1
        elif action.op is Op.R:
            kept[stage] -= 1
            full[stage] += 1
        elif action.op in (Op.B, Op.W):
            full[stage] -= 1
        if action.op in (Op.F, Op.R):
            key = tuple(kept.values()), tuple(full.values())
            seen.setdefault(key, _Moment(dict(kept), dict(full)))
    found: list[_Moment] = []
    for moment in seen.values():
        if not any(other.covers(moment) for other in found):
            found = [other for other in found if not moment.covers(other)] + [moment]
    return found


def _groups(placement: Placement) -> list[list[int]]:
    """Return the stages in groups whose ranks hold no stage of another group."""
    groups: list[set[int]] = []
    for rank in range(placement.num_ranks):
        held = set(placement.stages_of(rank))
        joined = [group for group in groups if group & held]
        groups = [group for group in groups if not group & held]
        groups.append(held.union(*joined))
    return [sorted(group) for group in groups if group]


def _check_feasible(
    limits: Sequence[Limit], choices: Sequence[Choices], limit_bytes: float
) -> None:
    lacking: dict[int, float] = {}
    for limit in limits:
        least = sum(n * int(choices[s].kept_bytes[0]) for s, n in limit.kept.items())
        if least > limit.room:
            lacking[limit.rank] = max(least - limit.room, lacking.get(limit.rank, 0.0))
    if lacking:
        shown = ", ".join(f"{bytes_text(lacking[r])} on rank {r}" for r in sorted(lacking)[:4])
        more = f" and on {len(lacking) - 4} ranks more" if len(lacking) > 4 else ""
        raise PartitionError(
            f"recompute: nothing fits, expected weights, gradients, optimizer and activations of "
            f"at most {bytes_text(limit_bytes)} a rank, got more by {shown}{more}, with all the "
            f"recomputation that helps; use more stages, more micro-batches of fewer samples, a "
            f"schedule that keeps fewer of them (one_f_one_b), or raise pipeline.memory_bytes"
        )


def _text(
    stages: Sequence[StageCount], chosen: Sequence[frozenset[int]], seconds: Sequence[float]
) -> str:
    """Return a line for each stage: what it recomputes, what that saves and costs."""
    lines: list[str] = []
    for index, (stage, own) in enumerate(zip(stages, chosen, strict=True)):
        if not own:
            lines.append(f"stage {index}: nothing")
            continue
        if seconds:
            cost = f"{sum(seconds[i] for i in own):.3g} s"
        else:
            cost = flops_text(stage.recompute_flops(own))
        kept, whole = stage.kept_bytes(own), stage.activation_bytes
        lines.append(
            f"stage {index}: {len(own)} of {len(stage.layers)} layers ({ranges_text(own)}), keeps "
            f"{bytes_text(kept)} of {bytes_text(whole)} a micro-batch for {cost} again"
        )
    return "\n".join(lines)
