"""`recompute=budget`: the cheapest recomputation that keeps every rank within its memory limit.

Each stage has a set of `RecomputeChoices`. The memory of a rank during an action is a sum over
its stages: the number of micro-batches of which only the part needed for recomputation is alive,
plus the number of which all activations are alive, each times its bytes. Ranks that share a stage
are solved together, all others separately.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError, PartitionError
from gpipe_hpc.planner.budget.many_stages import MemoryLimit, select
from gpipe_hpc.planner.budget.one_stage import RecomputeChoices, Weights, stage_choices
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.forecast import RankStates, activation_memory, rank_states
from gpipe_hpc.planner.memory.by_rank import limits_text
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.memory.sharing import OptimizerSharing
from gpipe_hpc.planner.memory.storages import StageStorages
from gpipe_hpc.planner.stages import StageCount, count_stages
from gpipe_hpc.schedule import (
    Action,
    Op,
    Placement,
    Schedule,
    add_offload,
    add_recompute,
    peak_memory,
)
from gpipe_hpc.schedule.table.dependencies import ValueKind
from gpipe_hpc.schedule.table.lifetimes import kept_lifetimes, offloaded_lifetimes
from gpipe_hpc.units import bytes_text, flops_text, ranges_text

_TRIES: Final = 5
_PER_SECOND: Final = 10**12  # seconds are converted to integers, so that sums are exact


@dataclass(frozen=True)
class Budget:
    """The layers that each stage recomputes, by index, and the schedule with recompute actions."""

    recomputed: tuple[frozenset[int], ...]
    schedule: Schedule
    text: str


def choose_recompute(
    model: ModelCount,
    counts: Sequence[int],
    schedule: Schedule,
    limit_bytes: float | Sequence[float],
    optimizer_states: int | OptimizerMemory,
    seconds: Sequence[float] = (),
    sharing: OptimizerSharing | None = None,
    offload: bool = False,
) -> Budget:
    """Choose the layers to recompute so that no rank exceeds its memory limit.

    The choice minimizes the summed cost of all R actions of a step: seconds, or, without `seconds`,
    FLOPs plus one per output byte, so that layers without FLOPs are not free. It is exact for the
    memory that `forecast` computes, except for stages or ranks with thousands of choices, and
    except with offload: there the offloaded micro-batches depend on the choice, so the choice is
    repeated with a limit lowered by the excess.

    Args:
      limit_bytes: limit of all ranks, or one limit per rank.
      schedule: the table without R actions.
      optimizer_states: number of values the optimizer keeps per parameter, or its memory model.
      seconds: measured forward seconds of each layer, if known.
      sharing: how replicas shard the optimizer state.
      offload: whether activations will be copied to the host, which frees device memory.

    Raises PartitionError, naming the ranks and the missing bytes, if nothing fits, and ConfigError
    for an invalid limit.
    """
    if isinstance(limit_bytes, int | float):
        each = [float(limit_bytes)] * schedule.num_ranks
    else:
        each = [*map(float, limit_bytes)]
    if not all(math.isfinite(limit) and limit > 0 for limit in each):
        raise ConfigError(
            f"recompute: pipeline.memory_bytes must be a finite number above 0, got "
            f"{limit_bytes}; set it to the bytes that each rank may use, for example 16e9"
        )
    stages = count_stages(model, counts)
    states = [
        rank_states(model, stages, schedule.placement, rank, optimizer_states, sharing)
        for rank in range(schedule.num_ranks)
    ]
    _check_updates(states, each)
    costs = _layer_costs(model, stages, seconds)
    less = [0.0] * schedule.num_ranks
    for _ in range(_TRIES):
        limits_left = [limit - taken for limit, taken in zip(each, less, strict=True)]
        chosen = _choose_layers(stages, costs, schedule, limits_left, each, states, offload)
        busy = {stage for stage, own in enumerate(chosen) if own}
        found = add_recompute(schedule, "except_last", busy)
        if not offload:
            break
        excess = _excess(stages, chosen, add_offload(found), each, states)
        if not any(excess):
            break
        less = [taken + more for taken, more in zip(less, excess, strict=True)]
    else:
        raise _nothing_fits(_lacks_text({r: more for r, more in enumerate(excess) if more}), each)
    return Budget(tuple(chosen), found, _text(stages, chosen, seconds))


def _choose_layers(
    stages: Sequence[StageCount],
    costs: Sequence[tuple[int, ...]],
    schedule: Schedule,
    limits_left: Sequence[float],
    limits_bytes: Sequence[float],
    states: Sequence[RankStates],
    offload: bool,
) -> list[frozenset[int]]:
    """Return the layers that each stage recomputes, so that each rank stays within its limit."""
    table = add_recompute(schedule, "except_last")
    limits = _limits(stages, add_offload(table) if offload else table, limits_left, states)
    choices = _choices_of(stages, costs, limits)
    runs = [0] * len(stages)
    for row in table.ranks:
        for action in row:
            runs[action.stage] += action.op is Op.R
    chosen: list[frozenset[int]] = [frozenset()] * len(stages)
    for group in _groups(table.placement):
        own = [limit for limit in limits if set(limit.kept) & set(group)]
        if not own:
            continue
        shared, times = {s: choices[s] for s in group}, {s: runs[s] for s in group}
        picked = select(shared, times, own)
        if picked is None:
            lacking = _lacking(limits, choices) or _lacking_together(shared, times, own)
            raise _nothing_fits(lacking, limits_bytes)
        for stage, choice in picked.items():
            places = choices[stage].recomputed(choice)
            chosen[stage] = frozenset(stages[stage].layers[place] for place in places)
    return chosen


def _excess(
    stages: Sequence[StageCount],
    chosen: Sequence[frozenset[int]],
    table: Schedule,
    limits_bytes: Sequence[float],
    states: Sequence[RankStates],
) -> list[float]:
    """Return the bytes by which each rank exceeds its limit with these layers recomputed."""
    peaks = peak_memory(table, activation_memory(stages, chosen))
    pairs = zip(states, peaks, limits_bytes, strict=True)
    return [max(0.0, own.with_activations(round(peak)) - limit) for own, peak, limit in pairs]


def _layer_costs(
    model: ModelCount, stages: Sequence[StageCount], seconds: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return the integer cost of recomputing each layer of each stage."""
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


def _choices_of(
    stages: Sequence[StageCount], costs: Sequence[tuple[int, ...]], limits: Sequence[MemoryLimit]
) -> list[RecomputeChoices]:
    """Return the possible recomputations of each stage; equal stages are solved once."""
    known: dict[tuple[StageStorages, tuple[int, ...], frozenset[Weights]], RecomputeChoices] = {}
    found: list[RecomputeChoices] = []
    for index, (stage, own) in enumerate(zip(stages, costs, strict=True)):
        # A stage without layers has nothing to recompute and keeps its input.
        storages = stage.storages if stage.layers else _solid(stage)
        key = storages, own, _weights(limits, index)
        if key not in known:
            known[key] = stage_choices(*key)
        found.append(known[key])
    return found


def _solid(stage: StageCount) -> StageStorages:
    return StageStorages((stage.activation_bytes,), frozenset({0}), ())


def _weights(limits: Sequence[MemoryLimit], stage: int) -> frozenset[Weights]:
    """Return the ratios of micro-batches before and after recomputation in a stage's limits."""
    found: set[Weights] = set()
    for limit in limits:
        pair = limit.kept.get(stage, 0), limit.full.get(stage, 0)
        if any(pair):
            divisor = math.gcd(*pair)
            found.add((pair[0] // divisor, pair[1] // divisor))
    return frozenset(found or {(1, 0)})


def _limits(
    stages: Sequence[StageCount],
    table: Schedule,
    limits_bytes: Sequence[float],
    states: Sequence[RankStates],
) -> list[MemoryLimit]:
    """Return a memory limit for each rank and each moment at which its memory may peak."""
    limits: list[MemoryLimit] = []
    for rank, row in enumerate(table.ranks):
        for moment in moments_of(row):
            whole = sum(n * stages[s].activation_bytes for s, n in moment.whole.items())
            room = limits_bytes[rank] - states[rank].total_bytes - whole
            limits.append(MemoryLimit(rank, moment.kept, moment.full, room))
    return limits


class LiveMicrobatches(NamedTuple):
    """Numbers of live micro-batches of each stage on a rank at one time."""

    full: dict[int, int]  # already recomputed: all activations are alive
    whole: dict[int, int]  # never recomputed
    kept: dict[int, int]  # to be recomputed later: only the kept part is alive

    def covers(self, other: "LiveMicrobatches") -> bool:
        """Return whether any recomputation needs at least as much memory now as at `other`."""
        return all(
            more >= 0
            for stage in self.full
            for more in accumulate(
                mine[stage] - theirs[stage] for mine, theirs in zip(self, other, strict=True)
            )
        )


def moments_of(row: Sequence[Action]) -> list[LiveMicrobatches]:
    """Return the moments during a rank's actions at which its memory may peak."""
    lives = kept_lifetimes(row, {ValueKind.ACTIVATIONS, ValueKind.RECOMPUTED})
    again = {life.place: life.first for life in lives if life.thing is ValueKind.RECOMPUTED}
    now = LiveMicrobatches(*(dict.fromkeys(sorted({a.stage for a in row}), 0) for _ in range(3)))
    # By position: changes of the counts at the start of an action and after it.
    starts: dict[int, list[tuple[dict[int, int], int, int]]] = defaultdict(list)
    ends: dict[int, list[tuple[dict[int, int], int, int]]] = defaultdict(list)
    for thing, stage, microbatch, first, last, _ in lives:
        if thing is ValueKind.RECOMPUTED:
            starts[first] += (now.kept, stage, -1), (now.full, stage, 1)
            ends[last].append((now.full, stage, -1))
        elif (stage, microbatch) in again:
            starts[first].append((now.kept, stage, 1))
        else:
            starts[first].append((now.whole, stage, 1))
            ends[last].append((now.whole, stage, -1))
    for life in offloaded_lifetimes(row):
        part = now.kept if life.place in again else now.whole
        ends[life.first].append((part, life.stage, -1))
        starts[life.last].append((part, life.stage, 1))
    seen: dict[tuple[int, ...], LiveMicrobatches] = {}
    for at in range(len(row)):
        for part, stage, more in starts[at]:
            part[stage] += more
        if starts[at]:
            key = tuple(n for part in now for n in part.values())
            seen.setdefault(key, LiveMicrobatches(*map(dict, now)))
        for part, stage, more in ends[at]:
            part[stage] += more
    found: list[LiveMicrobatches] = []
    for moment in seen.values():
        if not any(other.covers(moment) for other in found):
            found = [other for other in found if not moment.covers(other)] + [moment]
    return found


def _groups(placement: Placement) -> list[list[int]]:
    """Partition the stages into groups such that no rank holds stages of two groups."""
    groups: list[set[int]] = []
    for rank in range(placement.num_ranks):
        held = set(placement.stages_of(rank))
        joined = [group for group in groups if group & held]
        groups = [group for group in groups if not group & held]
        groups.append(held.union(*joined))
    return [sorted(group) for group in groups if group]


def _lacking(limits: Sequence[MemoryLimit], choices: Sequence[RecomputeChoices]) -> list[str]:
    """Describe the memory that ranks lack at some moment even if recomputation minimizes it."""
    lacking: dict[int, float] = {}
    for limit in limits:
        least = sum(int(limit.used(stage, choices[stage]).min()) for stage in limit.kept)
        lacking[limit.rank] = max(least - limit.room, lacking.get(limit.rank, 0.0))
    return _lacks_text(lacking)


def _lacks_text(lacking: Mapping[int, float]) -> list[str]:
    """Describe the missing bytes of up to four ranks, and count the remaining ranks."""
    short = [rank for rank in sorted(lacking) if lacking[rank] > 0]
    more = [f"more on {len(short) - 4} further ranks"] if len(short) > 4 else []
    return [f"{bytes_text(math.ceil(lacking[r]))} on rank {r}" for r in short[:4]] + more


def _lacking_together(
    choices: Mapping[int, RecomputeChoices], runs: Mapping[int, int], limits: Sequence[MemoryLimit]
) -> list[str]:
    """Describe the missing memory if each limit can be met, but not all of them together."""

    def fits(extra: int) -> bool:
        wider = [limit._replace(room=limit.room + extra) for limit in limits]
        return select(choices, runs, wider) is not None

    enough = 1
    while not fits(enough):
        enough *= 2
    too_little = enough // 2
    while enough - too_little > max(1, enough // 1000):
        middle = (enough + too_little) // 2
        too_little, enough = (too_little, middle) if fits(middle) else (middle, enough)
    ranks = sorted({limit.rank for limit in limits})
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {ranges_text(ranks)}"
    return [f"{bytes_text(enough)} on {where}"]


def _check_updates(states: Sequence[RankStates], limits_bytes: Sequence[float]) -> None:
    """Raise PartitionError if a rank lacks memory for its optimizer step.

    Recomputation does not help, because no activations are alive during the optimizer step.
    """
    pairs = enumerate(zip(states, limits_bytes, strict=True))
    lacking = _lacks_text({r: own.lasting_bytes + own.update_bytes - m for r, (own, m) in pairs})
    if lacking:
        raise PartitionError(
            f"recompute: nothing fits: weights, gradients, optimizer state and temporary tensors "
            f"of the optimizer step exceed the limit of {limits_text(limits_bytes)} a rank by "
            f"{', '.join(lacking)}, whatever is recomputed; use more stages, an optimizer with a "
            f"smaller state (sgd, adamw), outer.shard=flat, or raise pipeline.memory_bytes"
        )


def _nothing_fits(lacking: Sequence[str], limits_bytes: Sequence[float]) -> PartitionError:
    return PartitionError(
        f"recompute: nothing fits: weights, gradients, optimizer state and activations exceed the "
        f"limit of {limits_text(limits_bytes)} a rank by {', '.join(lacking)}, even with all "
        f"useful recomputation; use more stages, smaller micro-batches, a schedule that keeps "
        f"fewer of them alive (one_f_one_b), or raise pipeline.memory_bytes"
    )


def _text(
    stages: Sequence[StageCount], chosen: Sequence[frozenset[int]], seconds: Sequence[float]
) -> str:
    """Return one line per stage: its recomputed layers, the memory saved, and their cost."""
    lines: list[str] = []
    for index, (stage, own) in enumerate(zip(stages, chosen, strict=True)):
        if not own:
            lines.append(f"stage {index}: nothing")
            continue
        if seconds:
            cost = f"{sum(seconds[i] for i in own):.3g} s"
        else:
            cost = flops_text(stage.recompute_flops(own))
        kept, whole = stage.lives(own).kept, stage.activation_bytes
        lines.append(
            f"stage {index}: {len(own)} of {len(stage.layers)} layers ({ranges_text(own)}), keeps "
            f"{bytes_text(kept)} of {bytes_text(whole)} a micro-batch, costs {cost}"
        )
    return "\n".join(lines)
