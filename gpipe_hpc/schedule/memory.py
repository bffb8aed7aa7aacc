"""What a rank keeps in memory as it runs its list, given what a stage keeps of a micro-batch."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from gpipe_hpc.schedule.costs import Cost, per_stage
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.schedule import Schedule
from gpipe_hpc.schedule.timeline import Timeline


@dataclass(frozen=True)
class Memory:
    """What each op adds and frees, one number for all stages or one for each, in any unit.

    ``F`` adds `forward`, or `boundary` where an ``R`` follows, which adds `recompute` (None: what
    is missing to `forward`). ``OFFLOAD`` frees `offload`, of what is there (None: all of it), and
    ``FETCH`` adds the same again. ``I`` frees `input_gradient`, ``B`` and ``W`` all that is left. A
    holder of a stage has its `weights` all the time. The defaults count stage micro-batches.

    Of a stage that recomputes some of its layers, `boundary` is all that its forward keeps: what
    enters it and what the other layers keep; `recompute` is what ``R`` makes, which may be less
    than what is missing to `forward` where a layer gives back what it no longer needs.
    """

    forward: Cost = 1.0
    boundary: Cost = 0.0
    recompute: Cost | None = None
    offload: Cost | None = None
    input_gradient: Cost = 0.0
    weights: Cost = 0.0


# A stage and a micro-batch of it.
Place = tuple[int, int | None]


class Held(NamedTuple):
    """How much a rank holds from a time on."""

    time_s: float
    amount: float


def peak_memory(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """Return for each rank the most that it holds at once."""
    keeper = _Keeper(memory, schedule.num_stages)
    weights = per_stage("weights", memory.weights, schedule.num_stages)
    return tuple(
        sum(weights[stage] for stage in schedule.placement.stages_of(rank)) + keeper.peak(row)
        for rank, row in enumerate(schedule.ranks)
    )


def memory_over_time(timeline: Timeline, memory: Memory, rank: int) -> list[Held]:
    """Return what a rank holds, weights left out: added as an action starts, freed as it ends."""
    events = timeline.events[rank]
    changes: list[tuple[float, float]] = []
    replay = _Keeper(memory, timeline.num_stages).replay([event.action for event in events])
    for event, (added, freed) in zip(events, replay, strict=True):
        changes += ((event.start_s, added), (event.end_s, -freed))
    # Copies run beside compute, so the table's order is not that of time.
    changes.sort(key=itemgetter(0))
    held = [Held(timeline.start_s, 0.0)]
    for time, change in changes:
        if change:
            held.append(Held(time, held[-1].amount + change))
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
        self.offload = (
            None if memory.offload is None else per_stage("offload", memory.offload, num_stages)
        )
        self.input_gradient = per_stage("input_gradient", memory.input_gradient, num_stages)

    def peak(self, actions: Sequence[Action]) -> float:
        """Return the most that is held at once during the actions of a rank."""
        total = most = 0.0
        for added, freed in self.replay(actions):
            total += added
            most = max(most, total)
            total -= freed
        return most

    def replay(self, actions: Sequence[Action]) -> Iterator[tuple[float, float]]:
        """Yield what each action of a rank adds as it starts, and what it frees as it ends."""
        stages_of = {
            op: {(action.stage, action.microbatch) for action in actions if action.op is op}
            for op in (Op.R, Op.B, Op.W)
        }
        freed_later = stages_of[Op.B] | stages_of[Op.W]
        held: dict[Place, float] = defaultdict(float)
        away: dict[Place, float] = {}
        for op, stage, microbatch, _ in actions:
            key = (stage, microbatch)
            added = freed = 0.0
            if op is Op.F:
                added = (self.boundary if key in stages_of[Op.R] else self.forward)[stage]
                freed = 0.0 if key in freed_later else added
            elif op is Op.R:
                added = self.recompute[stage]
            elif op is Op.OFFLOAD:
                most = held[key] if self.offload is None else self.offload[stage]
                freed = away[key] = min(held[key], most)
            elif op is Op.FETCH:
                added = away.pop(key, 0.0)
            elif op is Op.I:
                freed = min(held[key], self.input_gradient[stage])
            elif op in (Op.B, Op.W):
                freed = held[key]
            if added or freed:
                held[key] += added - freed
            yield added, freed
