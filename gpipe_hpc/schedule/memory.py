"""Memory use of a rank over its action list, given what a stage stores for each micro-batch."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.schedule.costs import Cost, per_stage, shares_of_each
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.dependencies import ValueKind
from gpipe_hpc.schedule.table.lifetimes import (
    Lifetime,
    Place,
    in_flight,
    kept_lifetimes,
    offloaded_lifetimes,
    received,
)
from gpipe_hpc.schedule.table.schedule import Schedule, Skip
from gpipe_hpc.schedule.timeline import Timeline


@dataclass(frozen=True)
class Memory:
    """Memory that each op allocates and frees, one number for all stages or one per stage.

    The unit is arbitrary; with the defaults, results count micro-batches. All amounts are for a
    full micro-batch.

    Args:
        forward: allocated by ``F`` and freed by ``B`` or ``W``.
        boundary: allocated by ``F`` instead of `forward` if an ``R`` follows: the input of the
            stage and the activations of layers that are not recomputed.
        recompute: allocated by ``R``; None means `forward` minus `boundary`.
        offload: freed by the compute action after an ``OFFLOAD`` and allocated again by ``FETCH``;
            None means everything.
        input_gradient: the part freed by ``I``; ``W`` frees the rest.
        weights: memory of the stage's weights, present on each rank that holds it.
        output: output sent to the next stage, present until sent or used on the same rank; on the
            receiver, from ``RECV`` to the start of ``F``.
        gradient: gradient sent to the previous stage; on the receiver, from ``RECV`` to the end of
            ``B`` or ``I``.
        skips: size of the tensors of a skip in either direction, by (source stage, destination
            stage).
        shares: size of each micro-batch relative to a full one, as in `Costs`.
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


# Each (stage, micro-batch) pair counts as one, recomputed or not.
STAGE_MICROBATCHES: Final = Memory(forward=1.0, boundary=1.0)


class MemoryLevel(NamedTuple):
    """A point of a memory curve: the memory that a rank uses from `time_s` on."""

    time_s: float
    amount: float


class LiveCount(NamedTuple):
    """A point of a curve: the number of live (stage, micro-batch) pairs from `time_s` on."""

    time_s: float
    live: int


def peak_memory(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """Return the peak memory of each rank, including weights, in the unit of `memory`."""
    keeper = _StageMemory(memory, schedule.num_stages, schedule.num_microbatches, schedule.skips)
    weights = per_stage("weights", memory.weights, schedule.num_stages)
    return tuple(
        sum(weights[stage] for stage in schedule.placement.stages_of(rank)) + keeper.peak(row)
        for rank, row in enumerate(schedule.ranks)
    )


def peak_copies(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """Return the peak host memory of offloaded activations on each rank.

    A copy exists from its ``OFFLOAD`` to the end of its ``FETCH``.
    """
    keeper = _StageMemory(memory, schedule.num_stages, schedule.num_microbatches, schedule.skips)
    return tuple(map(keeper.peak_of_copies, schedule.ranks))


def memory_over_time(timeline: Timeline, memory: Memory, rank: int) -> list[MemoryLevel]:
    """Return the memory of a rank over time, without weights, one entry per change.

    Memory is allocated when an action starts and freed when it ends. The first entry is zero.
    """
    events = timeline.events[rank]
    keeper = _StageMemory(memory, timeline.num_stages, timeline.num_microbatches, timeline.skips)
    changes: list[tuple[float, float]] = []
    for event, added, freed in zip(
        events, *keeper.changes([event.action for event in events]), strict=True
    ):
        changes += ((event.start_s, added), (event.end_s, -freed))
    ends = {event.action: event.end_s for event in events}
    for life in offloaded_lifetimes([event.action for event in events]):
        # The copy may take longer than the compute action; its memory is reused only afterwards.
        over_s = ends[Action(Op.OFFLOAD, *life.place)]
        if over_s > events[life.first].end_s:
            moved = keeper.moved(life, recomputes=Action(Op.R, *life.place) in ends)
            changes += ((events[life.first].end_s, moved), (over_s, -moved))
    # Copies run in parallel with compute, so table order is not time order.
    changes.sort(key=itemgetter(0))
    held, amount = [MemoryLevel(timeline.start_s, 0.0)], 0.0
    for time_s, together in groupby(changes, itemgetter(0)):
        amount = sum((change for _, change in together), amount)
        if amount != held[-1].amount:
            held.append(MemoryLevel(time_s, amount))
    return held


def live_activations(timeline: Timeline, rank: int) -> list[LiveCount]:
    """Return the number of live (stage, micro-batch) pairs of a rank over time.

    A pair is live from the start of its ``F`` to the end of its ``B`` or ``W`` (of ``F`` if there
    is no backward), except while it is offloaded: from the end of the compute action after its
    ``OFFLOAD`` to the start of its ``FETCH``. Without offloading, the largest number equals
    `Timeline.peak_activations`.
    """
    steps: list[LiveCount] = []
    for time_s, amount in memory_over_time(timeline, STAGE_MICROBATCHES, rank)[1:]:
        live = round(amount)
        if live != (steps[-1].live if steps else 0):
            steps.append(LiveCount(time_s, live))
    return steps


def _peak_of(added: Sequence[float], freed: Sequence[float]) -> float:
    """Return the peak memory if each action allocates at its start and frees at its end."""
    total = most = 0.0
    for more, less in zip(added, freed, strict=True):
        total += more
        most = max(most, total)
        total -= less
    return most


class _StageMemory:
    """The amounts of a `Memory`, expanded to one number per stage."""

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
        """Return the peak memory of a rank over its actions, without weights."""
        return _peak_of(*self.changes(row))

    def peak_of_copies(self, row: Sequence[Action]) -> float:
        """Return the peak host memory of a rank's offloaded activations."""
        again = {action[1:3] for action in row if action.op is Op.R}
        added, freed = [0.0] * len(row), [0.0] * len(row)
        for life in kept_lifetimes(row, {ValueKind.COPY}):
            nbytes = self.moved(life, recomputes=life.place in again)
            added[life.first] += nbytes
            freed[life.last] += nbytes
        return _peak_of(added, freed)

    def changes(self, row: Sequence[Action]) -> tuple[list[float], list[float]]:
        """Return the memory that each action allocates at its start and frees at its end."""
        added, freed = [0.0] * len(row), [0.0] * len(row)
        self._keep(row, added, freed)
        if self.passes:
            self._pass(row, added, freed)
        return added, freed

    def _keep(self, row: Sequence[Action], added: list[float], freed: list[float]) -> None:
        """Add the activations that a stage keeps between the actions of a micro-batch."""
        lives: dict[ValueKind, list[Lifetime]] = defaultdict(list)
        for life in kept_lifetimes(row):
            lives[life.thing].append(life)
        again = {life.place for life in lives[ValueKind.RECOMPUTED]}
        ends: dict[Place, int] = {}
        for life in lives[ValueKind.ACTIVATIONS]:
            amount = (self.boundary if life.place in again else self.forward)[life.stage]
            amount *= self._share(life)
            added[life.first] += amount
            freed[life.last] += amount
            ends[life.place] = life.last
        for life in lives[ValueKind.RECOMPUTED]:
            amount = self.recompute[life.stage] * self._share(life)
            added[life.first] += amount
            freed[life.last] += amount
        for life in lives[ValueKind.INPUT_SHARE]:
            # Freed by the input gradient, before the rest.
            early = min(self._whole(life.place, again), self.input_gradient[life.stage])
            early *= self._share(life)
            freed[life.last] += early
            freed[ends[life.place]] -= early
        for life in offloaded_lifetimes(row) if lives[ValueKind.COPY] else ():
            moved = self.moved(life, recomputes=life.place in again)
            freed[life.first] += moved
            added[life.last] += moved

    def moved(self, life: Lifetime, *, recomputes: bool) -> float:
        """Return the memory that offloading a (stage, micro-batch) pair moves to the host."""
        here = (self.boundary if recomputes else self.forward)[life.stage]
        moved = here if self.offload is None else min(here, self.offload[life.stage])
        return moved * self._share(life)

    def _share(self, life: Lifetime) -> float:
        return 1.0 if life.microbatch is None else self.shares[life.microbatch]

    def _whole(self, place: Place, again: Collection[Place]) -> float:
        """Return the memory of a (stage, micro-batch) pair at the start of its backward."""
        stage = place[0]
        if place in again:
            return self.boundary[stage] + self.recompute[stage]
        return self.forward[stage]

    def _pass(self, row: Sequence[Action], added: list[float], freed: list[float]) -> None:
        """Add outputs and gradients on their way between stages, and receive buffers."""
        for life in in_flight(row, self.num_stages, self.skips):
            assert life.peer is not None, f"{life} has no consumer"
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
        """Return the size of the tensors that one stage passes to another."""
        if taker == source + 1:
            return self.output[source]
        if taker == source - 1:
            return self.gradient[source]
        return self.over_skips.get((min(source, taker), max(source, taker)), 0.0)
