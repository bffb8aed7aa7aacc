"""What a rank keeps in memory as it runs its list, given what a stage keeps of a micro-batch."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.schedule.costs import Cost, per_stage, shares_of_each
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.dependencies import Thing
from gpipe_hpc.schedule.table.lifetimes import Life, Place, away, in_flight, kept, received
from gpipe_hpc.schedule.table.schedule import Schedule, Skip
from gpipe_hpc.schedule.timeline import Timeline


@dataclass(frozen=True)
class Memory:
    """What each op allocates and frees, one number for all stages or one per stage, in any unit.

    ``F`` adds `forward`, or `boundary` if an ``R`` follows, which adds `recompute` (None: the rest
    of `forward`). The compute action after an ``OFFLOAD`` frees `offload` (None: all); ``FETCH``
    adds it again. ``I`` frees `input_gradient`, ``B`` and ``W`` the rest. A holder of a stage
    always has its `weights`. The defaults count micro-batches of a stage.

    For a stage that recomputes some layers, `boundary` is its input and what the other layers keep,
    and `recompute` is what ``R`` allocates.

    `output` is what a stage sends forward, `gradient` what it sends back, `skips` what a skip
    carries in either direction, by (source stage, destination stage). They exist until sent or used
    on the same rank, and on a receiver from ``RECV`` on: an output until its ``F`` starts, a
    gradient until its ``B`` or ``I`` ends.

    Everything is of a whole micro-batch; `shares` scales smaller ones, as in `Costs`.
    """

    forward: Cost = 1.0
    boundary: Cost = 0.0
    recompute: Cost | None = None
    offload: Cost | None = None
    input_gradient: Cost = 0.0
    weights: Cost = 0.0
    output: Cost = 0.0
    gradient: Cost = 0.0
    skips: Mapping[Skip, float] = field(default_factory=lambda: MappingProxyType({}))
    shares: Sequence[float] = ()


# Each stage micro-batch counts as one, recomputed or not.
STAGE_MICROBATCHES: Final = Memory(forward=1.0, boundary=1.0)


class Held(NamedTuple):
    """What a rank holds from a point in time on."""

    time_s: float
    amount: float


class Step(NamedTuple):
    """From `time_s` on, `live` micro-batches of a stage are kept."""

    time_s: float
    live: int


def peak_memory(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """Return the peak of each rank."""
    keeper = _Keeper(memory, schedule.num_stages, schedule.num_microbatches, schedule.skips)
    weights = per_stage("weights", memory.weights, schedule.num_stages)
    return tuple(
        sum(weights[stage] for stage in schedule.placement.stages_of(rank)) + keeper.peak(row)
        for rank, row in enumerate(schedule.ranks)
    )


def peak_copies(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """Return the peak of host copies of each rank, in the order of its list.

    A copy exists from its ``OFFLOAD`` to the end of its ``FETCH``.
    """
    keeper = _Keeper(memory, schedule.num_stages, schedule.num_microbatches, schedule.skips)
    return tuple(map(keeper.peak_of_copies, schedule.ranks))


def memory_over_time(timeline: Timeline, memory: Memory, rank: int) -> list[Held]:
    """Return what a rank holds over time, without weights: one entry per change.

    Memory is added when an action starts and freed when it ends. The first entry is zero.
    """
    events = timeline.events[rank]
    keeper = _Keeper(memory, timeline.num_stages, timeline.num_microbatches, timeline.skips)
    changes: list[tuple[float, float]] = []
    for event, added, freed in zip(
        events, *keeper.changes([event.action for event in events]), strict=True
    ):
        changes += ((event.start_s, added), (event.end_s, -freed))
    ends = {event.action: event.end_s for event in events}
    for life in away([event.action for event in events]):
        # The copy may take longer than the action beside it; who wants its memory waits.
        over_s = ends[Action(Op.OFFLOAD, *life.place)]
        if over_s > events[life.first].end_s:
            moved = keeper.moved(life, recomputes=Action(Op.R, *life.place) in ends)
            changes += ((events[life.first].end_s, moved), (over_s, -moved))
    # Copies run beside compute, so the table's order is not that of time.
    changes.sort(key=itemgetter(0))
    held, amount = [Held(timeline.start_s, 0.0)], 0.0
    for time_s, together in groupby(changes, itemgetter(0)):
        amount = sum((change for _, change in together), amount)
        if amount != held[-1].amount:
            held.append(Held(time_s, amount))
    return held


def live_activations(timeline: Timeline, rank: int) -> list[Step]:
    """Return how many micro-batches of one stage a rank keeps over time, a step for each change.

    One counts from the start of its ``F`` to the end of its ``B`` or ``W``, without either to the
    end of its ``F``, and not while it is on the host, from the end of the compute action behind its
    ``OFFLOAD`` to the start of its ``FETCH``. Without those, which run beside compute, the most is
    `Timeline.peak_activations`.
    """
    steps: list[Step] = []
    for time_s, amount in memory_over_time(timeline, STAGE_MICROBATCHES, rank)[1:]:
        live = round(amount)
        if live != (steps[-1].live if steps else 0):
            steps.append(Step(time_s, live))
    return steps


def _most(added: Sequence[float], freed: Sequence[float]) -> float:
    """Return the most that is there at once; each action adds as it starts, frees as it ends."""
    total = most = 0.0
    for more, less in zip(added, freed, strict=True):
        total += more
        most = max(most, total)
        total -= less
    return most


class _Keeper:
    """What each stage keeps, resolved."""

    def __init__(
        self, memory: Memory, num_stages: int, num_microbatches: int, skips: Sequence[Skip]
    ) -> None:
        self.num_stages, self.skips = num_stages, skips
        self.shares = shares_of_each(memory.shares, num_microbatches)
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
        self.output = per_stage("output", memory.output, num_stages)
        self.gradient = per_stage("gradient", memory.gradient, num_stages)
        self.over_skips = memory.skips
        self.passes = any([*self.output, *self.gradient, *memory.skips.values()])

    def peak(self, row: Sequence[Action]) -> float:
        """Return the most that is held at once during the actions of a rank."""
        return _most(*self.changes(row))

    def peak_of_copies(self, row: Sequence[Action]) -> float:
        """Return the most that a rank has on the host at once."""
        again = {action[1:3] for action in row if action.op is Op.R}
        added, freed = [0.0] * len(row), [0.0] * len(row)
        for life in kept(row, {Thing.COPY}):
            nbytes = self.moved(life, recomputes=life.place in again)
            added[life.first] += nbytes
            freed[life.last] += nbytes
        return _most(added, freed)

    def changes(self, row: Sequence[Action]) -> tuple[list[float], list[float]]:
        """Return what each action of a rank adds as it starts, and what it frees as it ends."""
        added, freed = [0.0] * len(row), [0.0] * len(row)
        self._keep(row, added, freed)
        if self.passes:
            self._pass(row, added, freed)
        return added, freed

    def _keep(self, row: Sequence[Action], added: list[float], freed: list[float]) -> None:
        """Count what stays with its stage and micro-batch."""
        lives: dict[Thing, list[Life]] = defaultdict(list)
        for life in kept(row):
            lives[life.thing].append(life)
        again = {life.place for life in lives[Thing.RECOMPUTED]}
        ends: dict[Place, int] = {}
        for life in lives[Thing.ACTIVATIONS]:
            amount = (self.boundary if life.place in again else self.forward)[life.stage]
            amount *= self._share(life)
            added[life.first] += amount
            freed[life.last] += amount
            ends[life.place] = life.last
        for life in lives[Thing.RECOMPUTED]:
            amount = self.recompute[life.stage] * self._share(life)
            added[life.first] += amount
            freed[life.last] += amount
        for life in lives[Thing.INPUT_SHARE]:
            # Freed earlier than all else.
            early = min(self._whole(life.place, again), self.input_gradient[life.stage])
            early *= self._share(life)
            freed[life.last] += early
            freed[ends[life.place]] -= early
        for life in away(row) if lives[Thing.COPY] else ():
            moved = self.moved(life, recomputes=life.place in again)
            freed[life.first] += moved
            added[life.last] += moved

    def moved(self, life: Life, *, recomputes: bool) -> float:
        """Return how much of a place is on the host while it is away."""
        here = (self.boundary if recomputes else self.forward)[life.stage]
        moved = here if self.offload is None else min(here, self.offload[life.stage])
        return moved * self._share(life)

    def _share(self, life: Life) -> float:
        return 1.0 if life.microbatch is None else self.shares[life.microbatch]

    def _whole(self, place: Place, again: Collection[Place]) -> float:
        """Return what is kept of a stage micro-batch as its backward starts."""
        stage = place[0]
        if place in again:
            return self.boundary[stage] + self.recompute[stage]
        return self.forward[stage]

    def _pass(self, row: Sequence[Action], added: list[float], freed: list[float]) -> None:
        """Count what goes from one stage to another, on its way."""
        for life in in_flight(row, self.num_stages, self.skips):
            assert life.peer is not None, f"{life} goes nowhere"
            amount = self._passed(life.stage, life.peer) * self._share(life)
            added[life.first] += amount
            freed[life.last] += amount
        for life in received(row):
            source = life.peer
            if source is None:
                source = life.stage + (-1 if row[life.first].op is Op.RECV_F else 1)
            amount = self._passed(source, life.stage) * self._share(life)
            added[life.first] += amount
            if source < life.stage:
                added[life.last] -= amount  # an input, which its stage keeps or drops
            else:
                freed[life.last] += amount

    def _passed(self, source: int, taker: int) -> float:
        """Return the size of what one stage gives another."""
        if taker == source + 1:
            return self.output[source]
        if taker == source - 1:
            return self.gradient[source]
        return self.over_skips.get((min(source, taker), max(source, taker)), 0.0)
