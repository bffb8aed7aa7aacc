"""`recompute=budget`: the least recomputation with which every rank stays within its memory.

Each stage has its `Choices`; what a rank holds while it runs an action is a sum over its stages:
so many micro-batches of which the kept part lives, and so many of which everything does. Ranks
that hold a stage in common are solved together, all others one by one.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError, PartitionError
from gpipe_hpc.planner.budget.many_stages import Limit, select
from gpipe_hpc.planner.budget.one_stage import Choices, Weights, stage_choices
from gpipe_hpc.planner.costs.counted import ModelCount
from gpipe_hpc.planner.forecast import RankStates, activation_memory, rank_states
from gpipe_hpc.planner.memory.by_rank import limits_text
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.memory.sharing import Sharing
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
from gpipe_hpc.schedule.table.dependencies import Thing
from gpipe_hpc.schedule.table.lifetimes import away, kept
from gpipe_hpc.units import bytes_text, flops_text, ranges_text

_TRIES: Final = 5
_PER_SECOND: Final = 10**12  # measured seconds as integers, so that sums are exact


@dataclass(frozen=True)
class Budget:
    """What each stage recomputes: layers by their index; and the bare table with those R."""

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
    sharing: Sharing | None = None,
    offload: bool = False,
) -> Budget:
    """Choose the layers to recompute, so that no rank's weights and activations exceed a limit.

    `limit_bytes`: one for all ranks, or one for each.
    `schedule` is bare, without R; `optimizer_states` is how many numbers the optimizer keeps for
    each parameter; `seconds` are those of the forward of each layer, where they were measured;
    `sharing` says how the optimizer's state is divided over copies. `offload`: the table will get
    copies to the host; what they take away from the device is no part of what is held.
    Chosen is the least sum over all R of a step: of the seconds, or of the FLOPs and one more for
    each byte that a layer gives, so that what has no FLOPs is not for nothing. It is exact for the
    memory that `forecast` foresees, except for a stage or rank with thousands of choices, and with
    offload, where a stage that recomputes nothing copies other micro-batches than one that does:
    what then does not fit is chosen again with as much less room.

    Raises PartitionError, naming the ranks and what they lack, where nothing fits; ConfigError for
    a limit that is none.
    """
    if isinstance(limit_bytes, int | float):
        each = [float(limit_bytes)] * schedule.num_ranks
    else:
        each = [*map(float, limit_bytes)]
    if not all(math.isfinite(limit) and limit > 0 for limit in each):
        raise ConfigError(
            f"recompute: memory_bytes is what each rank may fill, expected a finite number above "
            f"0, got {limit_bytes}; set pipeline.memory_bytes to the bytes of a device, as 16e9"
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
        rooms = [limit - taken for limit, taken in zip(each, less, strict=True)]
        chosen = _chosen(stages, costs, schedule, rooms, each, states, offload)
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


def _chosen(
    stages: Sequence[StageCount],
    costs: Sequence[tuple[int, ...]],
    schedule: Schedule,
    rooms: Sequence[float],
    limits_bytes: Sequence[float],
    states: Sequence[RankStates],
    offload: bool,
) -> list[frozenset[int]]:
    """Return the layers that each stage recomputes, so that ranks stay within their `rooms`."""
    table = add_recompute(schedule, "except_last")
    limits = _limits(stages, add_offload(table) if offload else table, rooms, states)
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
    """Return by how much each rank of a whole table exceeds what it may hold."""
    peaks = peak_memory(table, activation_memory(stages, chosen))
    pairs = zip(states, peaks, limits_bytes, strict=True)
    return [max(0.0, own.with_activations(round(peak)) - limit) for own, peak, limit in pairs]


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


def _choices_of(
    stages: Sequence[StageCount], costs: Sequence[tuple[int, ...]], limits: Sequence[Limit]
) -> list[Choices]:
    """Return the choices of each stage; equal stages are solved once."""
    known: dict[tuple[StageStorages, tuple[int, ...], frozenset[Weights]], Choices] = {}
    found: list[Choices] = []
    for index, (stage, own) in enumerate(zip(stages, costs, strict=True)):
        # A stage without layers has nothing to recompute, and holds on to what it is given.
        storages = stage.storages if stage.layers else _solid(stage)
        key = storages, own, _weights(limits, index)
        if key not in known:
            known[key] = stage_choices(*key)
        found.append(known[key])
    return found


def _solid(stage: StageCount) -> StageStorages:
    return StageStorages((stage.activation_bytes,), frozenset({0}), ())


def _weights(limits: Sequence[Limit], stage: int) -> frozenset[Weights]:
    """Return in which ratios what a stage keeps, and what lives behind R, ever count."""
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
) -> list[Limit]:
    """Return what the stages of each rank may keep, at each time that may be its fullest."""
    limits: list[Limit] = []
    for rank, row in enumerate(table.ranks):
        for moment in moments_of(row):
            whole = sum(n * stages[s].activation_bytes for s, n in moment.whole.items())
            room = limits_bytes[rank] - states[rank].total_bytes - whole
            limits.append(Limit(rank, moment.kept, moment.full, room))
    return limits


class Moment(NamedTuple):
    """How many micro-batches of each stage live on a rank at some time."""

    full: dict[int, int]  # recomputed
    whole: dict[int, int]  # never to be
    kept: dict[int, int]  # still to be

    def covers(self, other: "Moment") -> bool:
        """Say whether at least as much lives as at another time, whatever is kept."""
        return all(
            more >= 0
            for stage in self.full
            for more in accumulate(
                mine[stage] - theirs[stage] for mine, theirs in zip(self, other, strict=True)
            )
        )


def moments_of(row: Sequence[Action]) -> list[Moment]:
    """Return the times of a rank's list at which it may hold most."""
    lives = kept(row, {Thing.ACTIVATIONS, Thing.RECOMPUTED})
    again = {life.place: life.first for life in lives if life.thing is Thing.RECOMPUTED}
    now = Moment(*(dict.fromkeys(sorted({a.stage for a in row}), 0) for _ in range(3)))
    # By position: what one more, or less, there is at the start of an action or behind it.
    starts: dict[int, list[tuple[dict[int, int], int, int]]] = defaultdict(list)
    ends: dict[int, list[tuple[dict[int, int], int, int]]] = defaultdict(list)
    for thing, stage, microbatch, first, last, _ in lives:
        if thing is Thing.RECOMPUTED:
            starts[first] += (now.kept, stage, -1), (now.full, stage, 1)
            ends[last].append((now.full, stage, -1))
        elif (stage, microbatch) in again:
            starts[first].append((now.kept, stage, 1))
        else:
            starts[first].append((now.whole, stage, 1))
            ends[last].append((now.whole, stage, -1))
    for life in away(row):
        part = now.kept if life.place in again else now.whole
        ends[life.first].append((part, life.stage, -1))
        starts[life.last].append((part, life.stage, 1))
    seen: dict[tuple[int, ...], Moment] = {}
    for at in range(len(row)):
        for part, stage, more in starts[at]:
            part[stage] += more
        if starts[at]:
            key = tuple(n for part in now for n in part.values())
            seen.setdefault(key, Moment(*map(dict, now)))
        for part, stage, more in ends[at]:
            part[stage] += more
    found: list[Moment] = []
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


def _lacking(limits: Sequence[Limit], choices: Sequence[Choices]) -> list[str]:
    """Return what each rank lacks at one time, even with the least that it can do with then."""
    lacking: dict[int, float] = {}
    for limit in limits:
        least = sum(int(limit.used(stage, choices[stage]).min()) for stage in limit.kept)
        lacking[limit.rank] = max(least - limit.room, lacking.get(limit.rank, 0.0))
    return _lacks_text(lacking)


def _lacks_text(lacking: Mapping[int, float]) -> list[str]:
    """Return what ranks lack, by rank: nothing of those that lack nothing, and not of too many."""
    short = [rank for rank in sorted(lacking) if lacking[rank] > 0]
    more = [f"more on {len(short) - 4} further ranks"] if len(short) > 4 else []
    return [f"{bytes_text(math.ceil(lacking[r]))} on rank {r}" for r in short[:4]] + more


def _lacking_together(
    choices: Mapping[int, Choices], runs: Mapping[int, int], limits: Sequence[Limit]
) -> list[str]:
    """Return what is lacking where each limit can be met, but not all with the same choice."""

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
    """Raise PartitionError where the optimizer's step fills some rank: none recomputes then."""
    pairs = enumerate(zip(states, limits_bytes, strict=True))
    lacking = _lacks_text({r: own.lasting_bytes + own.update_bytes - m for r, (own, m) in pairs})
    if lacking:
        raise PartitionError(
            f"recompute: nothing fits, expected weights, gradients, optimizer and what its step "
            f"makes of at most {limits_text(limits_bytes)} a rank, got too much by "
            f"{', '.join(lacking)}, whatever is recomputed; use more stages, an optimizer that "
            f"keeps less (sgd, adamw), outer.shard=flat, or raise pipeline.memory_bytes"
        )


def _nothing_fits(lacking: Sequence[str], limits_bytes: Sequence[float]) -> PartitionError:
    return PartitionError(
        f"recompute: nothing fits, expected weights, gradients, optimizer and activations of at "
        f"most {limits_text(limits_bytes)} a rank, got too much by {', '.join(lacking)} with "
        f"all recomputation that helps; use more stages, more micro-batches of fewer samples, a "
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
        kept, whole = stage.lives(own).kept, stage.activation_bytes
        lines.append(
            f"stage {index}: {len(own)} of {len(stage.layers)} layers ({ranges_text(own)}), keeps "
            f"{bytes_text(kept)} of {bytes_text(whole)} a micro-batch for {cost} again"
        )
    return "\n".join(lines)
