"""What a rank keeps in memory as it runs its list, given what a stage keeps of a micro-batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpipe_hpc.schedule.actions import Action, Op
from gpipe_hpc.schedule.costs import Cost, per_stage
from gpipe_hpc.schedule.table import Schedule
from gpipe_hpc.schedule.timeline import Timeline


@dataclass(frozen=True)
class Memory:
    """What each op adds and frees, one number for all stages or one for each, in any unit.

    ``F`` adds `forward`, or `boundary` where an ``R`` follows, which adds `recompute` (None: what
    is missing to `forward`). ``I`` frees `input_gradient`, ``B`` and ``W`` all that is left. A
    holder of a stage has its `weights` all the time. The defaults count stage micro-batches.
    """

    forward: Cost = 1.0
    boundary: Cost = 0.0
    recompute: Cost | None = None
    input_gradient: Cost = 0.0
    weights: Cost = 0.0


class Held(NamedTuple):
    """How much a rank holds from a time on."""

    time_s: float
    amount: float


def peak_memory(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """Return for each rank the most that it holds at once."""
    keeper = _Keeper(memory, schedule.num_stages)
    weights = per_stage("weights", memory.weights, schedule.num_stages)
    return tuple(
        sum(weights[stage] for stage in schedule.placement.stages_of(rank))
        + max((during for during, _ in keeper.replay(row)), default=0.0)
        for rank, row in enumerate(schedule.ranks)
    )


def memory_over_time(timeline: Timeline, memory: Memory, rank: int) -> list[Held]:
    """Return what a rank holds, weights left out: added as an action starts, freed as it ends."""
    keeper = _Keeper(memory, timeline.num_stages)
    events = timeline.events[rank]
    held = [Held(timeline.start_s, 0.0)]
    changes = keeper.replay([event.action for event in events])
    for event, (during, after) in zip(events, changes, strict=True):
        for time, amount in ((event.start_s, during), (event.end_s, after)):
            if amount != held[-1].amount:
                held.append(Held(time, amount))
    return held


class _Keeper:
    """What each stage keeps, resolved."""

    def __init__(self, memory: Memory, num_stages: int) -> None:
        self.forward = per_stage("forward", memory.forward, num_stages)
        self.boundary = per_stage("boundary", memory.boundary, num_stages)
        if memory.recompute is None:
            pairs = zip(self.forward, self.boundary, strict=True)
            self.recompute = [max(0.0, full - kept) for full, kept in pairs]
        else:
            self.recompute = per_stage("recompute", memory.recompute, num_stages)
        self.input_gradient = per_stage("input_gradient", memory.input_gradient, num_stages)

    def replay(self, actions: Sequence[Action]) -> Iterator[tuple[float, float]]:
        """Yield what is held during each action of a rank, and what after it."""
        stages_of = {
            op: {(action.stage, action.microbatch) for action in actions if action.op is op}
            for op in (Op.R, Op.B, Op.W)
        }
        freed = stages_of[Op.B] | stages_of[Op.W]
        held: dict[tuple[int, int | None], float] = {}
        total = 0.0
        for op, stage, microbatch, _ in actions:
            key = (stage, microbatch)
            added = 0.0
            if op is Op.F:
                added = (self.boundary if key in stages_of[Op.R] else self.forward)[stage]
            elif op is Op.R:
                added = self.recompute[stage]
            during = total + added
            kept = held.get(key, 0.0) + added
            if op is Op.I:
                kept = max(0.0, kept - self.input_gradient[stage])
            elif op in (Op.B, Op.W) or (op is Op.F and key not in freed):
                kept = 0.0
            if op in (Op.F, Op.R, Op.I, Op.B, Op.W):
                total += kept - held.get(key, 0.0)
                held[key] = kept
            yield during, total
