"""List scheduling: whenever a rank is free, it starts the ready action of the highest priority."""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.dependencies import dependencies
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD, STARTS_ACTIVATIONS
from gpipe_hpc.schedule.table.rows import Kind, Row, integers
from gpipe_hpc.schedule.table.schedule import Placement

# Function from op, stage and micro-batch to a sort key; the smallest ready action runs first.
Priority = Callable[[Op, int, int], tuple[int, ...]]


_Kind = tuple[Op, int]
# An action that is or will be ready: micro-batch, time and priority.
_Waiting = tuple[int, float, tuple[int, ...]]
# The next action of a place: priority, order of first use of the place, ready time, place.
_Next = tuple[tuple[int, ...], int, float, int]


class Rules(NamedTuple):
    """Parameters of a list scheduler.

    Args:
        durations: ``durations[op][stage]`` is the time of an op; contains ``I`` and ``W`` if
            backwards are split.
        priority: returns the sort key of an action; the ready action with the least key runs first.
        transfers: time of a transfer over the boundary after each stage.
        limits: largest number of live (stage, micro-batch) pairs of each rank; None means
            unlimited.
        paces: relative compute time of each rank; empty means equal.
    """

    durations: Mapping[Op, Sequence[float]]
    priority: Priority
    transfers: Sequence[float]
    limits: Sequence[int] | None = None
    paces: Sequence[float] = ()


def list_schedule(placement: Placement, rules: Rules) -> list[Row]:
    """Return each rank's order of F and B, or of F, I and W.

    The micro-batches of a stage run in order. A forward starts only if the limit leaves space for
    one micro-batch in each later stage of its rank, because the pipeline could deadlock otherwise.

    Raises:
        ScheduleError: the limits are too small to finish.
    """
    state = _SchedulerState(placement, rules)
    state.run()
    rows = [Row.in_order(state.row_kinds, *columns) for columns in state.columns]
    if sum(map(len, rows)) < state.num_actions:
        raise ScheduleError(
            f"list scheduling: the limits {rules.limits} are too small: each rank must keep one "
            f"micro-batch for each of its stages at once; raise them"
        )
    return rows


class _ReadyRule(NamedTuple):
    """A kind of action that becomes ready when another ends, and the transfer time in between."""

    place: int
    stage: int
    transfer: float


class _SchedulerState:
    """State of the scheduler: started and ready actions, and the times at which ranks choose again.

    As there are millions of actions, an op of a stage is represented by one number, its *place*.
    """

    def __init__(self, placement: Placement, rules: Rules) -> None:
        self.placement, self.rules = placement, rules
        num_ranks, num_stages = placement.num_ranks, placement.num_stages
        self.free_at = [0.0] * num_ranks
        self.paces = self.rules.paces or [1.0] * num_ranks
        self.live = [0] * num_ranks
        needs = _needs(rules.durations, num_stages)
        self.kinds = list(needs)
        self.row_kinds: list[Kind] = [(op, stage, None) for op, stage in self.kinds]
        self.columns = [(integers(), integers()) for _ in range(num_ranks)]
        self.durations = [rules.durations[op][stage] for op, stage in self.kinds]
        self.starts = [op in STARTS_ACTIVATIONS for op, _ in self.kinds]
        self.spare = _later_stages(placement, self.kinds)
        self.ends = [op in ENDS_BACKWARD for op, _ in self.kinds]
        self.ways = _ways(needs, rules.transfers)
        # For each rank and place: its order of first use, and a heap of actions that are or will be
        # ready. `next` has the first action of each place, sorted by priority.
        self.queues: list[dict[int, tuple[int, list[_Waiting]]]] = [{} for _ in range(num_ranks)]
        self.next: list[list[_Next]] = [[] for _ in range(num_ranks)]
        # The times at which ranks choose an action, and which ranks.
        self.times: list[float] = []
        self.looks: dict[float, set[int]] = {}
        self.num_actions = len(self.kinds) * placement.num_microbatches
        first = self.kinds.index((Op.F, 0))
        for microbatch in range(placement.num_microbatches):
            rank = placement.rank_of(0, microbatch)
            self._wait(first, rank, microbatch, 0.0)
            self._look(rank, 0.0)

    def run(self) -> None:
        """Let ranks choose actions in order of time until none is left."""
        times, looks, free_at, best, start = (
            self.times,
            self.looks,
            self.free_at,
            self._best,
            self._start,
        )
        while times:
            now = heapq.heappop(times)
            ranks = sorted(looks.pop(now))
            for number, rank in enumerate(ranks, 1):
                if free_at[rank] <= now:
                    at = best(rank, now)
                    if at is not None:
                        start(at, rank, now)
                        if now in looks:  # an action of no duration ended: others may be ready now
                            for again in looks.pop(now):
                                insort(ranks, again, number)
                            heapq.heappop(times)

    def _look(self, rank: int, at: float) -> None:
        """Let a rank choose an action at a given time."""
        ranks = self.looks.get(at)
        if ranks is None:
            self.looks[at] = {rank}
            heapq.heappush(self.times, at)
        else:
            ranks.add(rank)

    def _best(self, rank: int, now: float) -> int | None:
        """Return the index of the ready action that a rank runs next, or None."""
        limits, spare = self.rules.limits, self.spare[rank]
        room = math.inf if limits is None else limits[rank] - self.live[rank]
        for at, (_, _, ready_at, place) in enumerate(self.next[rank]):
            if ready_at <= now and (place not in spare or spare[place] < room):
                return at
        return None

    def _wait(self, place: int, rank: int, microbatch: int, ready_at: float) -> None:
        """Queue an action that is ready at a given time, with its priority computed once."""
        key = self.rules.priority(*self.kinds[place], microbatch)
        queues, following = self.queues[rank], self.next[rank]
        if place not in queues:
            queues[place] = len(queues), []
        turn, queue = queues[place]
        waiting = microbatch, ready_at, key
        if not queue or waiting < queue[0]:
            if queue:
                _, before_at, before = queue[0]
                following.remove((before, turn, before_at, place))
            insort(following, (key, turn, ready_at, place))
        heapq.heappush(queue, waiting)

    def _start(self, at: int, rank: int, now: float) -> None:
        """Run one of the queued actions of a rank."""
        _, turn, _, place = self.next[rank].pop(at)
        _, queue = self.queues[rank][place]
        microbatch, _, _ = heapq.heappop(queue)
        if queue:
            _, ready_at, key = queue[0]
            insort(self.next[rank], (key, turn, ready_at, place))
        which, numbers = self.columns[rank]
        which.append(place)
        numbers.append(microbatch)
        end = now + self.durations[place] * self.paces[rank]
        self.free_at[rank] = end
        self._look(rank, end)
        self.live[rank] += self.starts[place] - self.ends[place]
        route = self.placement.routes[self.placement.route_of[microbatch]]
        for follower, stage, transfer in self.ways[place]:
            user = route[stage]
            ready_at = end if user == rank else end + transfer
            self._wait(follower, user, microbatch, ready_at)
            # A rank chooses again at the end of its current action anyway.
            if ready_at > self.free_at[user] or (ready_at == self.free_at[user] and user != rank):
                self._look(user, ready_at)


def _ways(
    needs: Mapping[_Kind, Sequence[_Kind]], transfers: Sequence[float]
) -> list[list[_ReadyRule]]:
    """Return, for each op and stage (place), the kinds of actions that become ready at its end."""
    places = {kind: place for place, kind in enumerate(needs)}
    found: list[list[_ReadyRule]] = [[] for _ in needs]
    for (op, stage), needed in needs.items():
        for kind in needed:
            transfer = transfers[min(stage, kind[1])] if stage != kind[1] else 0.0
            found[places[kind]].append(_ReadyRule(places[op, stage], stage, transfer))
    return found


def _needs(ops: Iterable[Op], num_stages: int) -> dict[_Kind, list[_Kind]]:
    """Return the dependencies of each op and stage within a micro-batch; B stands for I and W.

    There is at most one dependency: when the backward of the next stage is done, an action's own
    forward is done, too.
    """
    full = Op.B in ops
    found: dict[_Kind, list[_Kind]] = {}
    for op in ops:
        for stage in range(num_stages):
            needs = dependencies(Action(op, stage, 0), num_stages, 1)
            kinds = [(Op.B if full and need.op is Op.I else need.op, need.stage) for need in needs]
            own = [kind for kind in kinds if kind[0] in ops]
            found[op, stage] = (
                own if len(own) == 1 else [kind for kind in own if kind[0] is not Op.F]
            )
            assert len(found[op, stage]) <= 1, f"{stage}{op} waits for {found[op, stage]}"
    return found


def _later_stages(placement: Placement, kinds: Sequence[_Kind]) -> list[dict[int, int]]:
    """Return, for each rank, the number of its later stages for each forward on it (by place)."""
    found: list[dict[int, int]] = [{} for _ in range(placement.num_ranks)]
    for place, (op, stage) in enumerate(kinds):
        if op in STARTS_ACTIVATIONS:
            for rank in placement.holders(stage):
                stages = placement.stages_of(rank)
                found[rank][place] = len(stages) - 1 - stages.index(stage)
    return found
