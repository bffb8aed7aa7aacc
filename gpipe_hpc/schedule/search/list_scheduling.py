"""List scheduling: each rank, whenever it is free, starts the best action that is ready."""

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

# Of op, stage and micro-batch the key by which a rank chooses: what is ready and has the smallest.
Priority = Callable[[Op, int, int], tuple[int, ...]]


_Kind = tuple[Op, int]
# The micro-batch of what is or will be ready, when, and its priority.
_Waiting = tuple[int, float, tuple[int, ...]]
# The priority of a place's next, the turn of that place, when it is ready, and the place.
_Next = tuple[tuple[int, ...], int, float, int]


class Rules(NamedTuple):
    """What a list scheduler goes by.

    `durations[op][stage]` are times of the ops, which say whether backward is split; `transfers[s]`
    is that of the boundary behind stage s. `limits[rank]` bounds the live stage micro-batches.
    `paces[rank]` is how many times as long a rank takes; empty: all take as long as it says.
    """

    durations: Mapping[Op, Sequence[float]]
    priority: Priority
    transfers: Sequence[float]
    limits: Sequence[int] | None = None
    paces: Sequence[float] = ()


def list_schedule(placement: Placement, rules: Rules) -> list[Row]:
    """Return each rank's order of F and B, or F, I and W; refuse limits under which it gets stuck.

    A stage's micro-batches run in order. A forward into a stage leaves room under the limit for one
    micro-batch in each later stage of its rank, without which the pipeline could stop.
    """
    state = _State(placement, rules)
    state.run()
    rows = [Row.in_order(state.row_kinds, *columns) for columns in state.columns]
    if sum(map(len, rows)) < state.num_actions:
        raise ScheduleError(
            f"list scheduling: stuck, expected room for every stage of a rank at once, got limits "
            f"{rules.limits}; raise them"
        )
    return rows


class _Way(NamedTuple):
    """Whom the end of a kind makes ready: another kind, and what the transfer to it takes."""

    place: int
    stage: int
    transfer: float


class _State:
    """What has been started, what is ready, and when each rank looks next.

    There are millions of actions, so an op and a stage are one number here, their *place*.
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
        self.spare = _spare_room(placement, self.kinds)
        self.ends = [op in ENDS_BACKWARD for op, _ in self.kinds]
        self.ways = _ways(needs, rules.transfers)
        # For each rank, by place, the turn in which it first had one, and what is or will be ready;
        # of each place the next in the order of priority.
        self.queues: list[dict[int, tuple[int, list[_Waiting]]]] = [{} for _ in range(num_ranks)]
        self.next: list[list[_Next]] = [[] for _ in range(num_ranks)]
        # The times at which ranks look for work, and which ranks do.
        self.times: list[float] = []
        self.looks: dict[float, set[int]] = {}
        self.num_actions = len(self.kinds) * placement.num_microbatches
        first = self.kinds.index((Op.F, 0))
        for microbatch in range(placement.num_microbatches):
            rank = placement.rank_of(0, microbatch)
            self._wait(first, rank, microbatch, 0.0)
            self._look(rank, 0.0)

    def run(self) -> None:
        """Let ranks look for work, in the order of time, until nobody has any."""
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
                        if now in looks:  # what takes no time is over: who comes next may have more
                            for again in looks.pop(now):
                                insort(ranks, again, number)
                            heapq.heappop(times)

    def _look(self, rank: int, at: float) -> None:
        """Let a rank look for work at some time."""
        ranks = self.looks.get(at)
        if ranks is None:
            self.looks[at] = {rank}
            heapq.heappush(self.times, at)
        else:
            ranks.add(rank)

    def _best(self, rank: int, now: float) -> int | None:
        """Return which of a rank's next it runs; of equals the place that it had first."""
        limits, spare = self.rules.limits, self.spare[rank]
        room = math.inf if limits is None else limits[rank] - self.live[rank]
        for at, (_, _, ready_at, place) in enumerate(self.next[rank]):
            if ready_at <= now and (place not in spare or spare[place] < room):
                return at
        return None

    def _wait(self, place: int, rank: int, microbatch: int, ready_at: float) -> None:
        """Queue an action, with its priority: it is compared many times."""
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
        """Run one of a rank's next."""
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
            # A rank looks at the end of what it runs anyway.
            if ready_at > self.free_at[user] or (ready_at == self.free_at[user] and user != rank):
                self._look(user, ready_at)


def _ways(needs: Mapping[_Kind, Sequence[_Kind]], transfers: Sequence[float]) -> list[list[_Way]]:
    """Return by place whom the end of a kind may make ready."""
    places = {kind: place for place, kind in enumerate(needs)}
    found: list[list[_Way]] = [[] for _ in needs]
    for (op, stage), needed in needs.items():
        for kind in needed:
            transfer = transfers[min(stage, kind[1])] if stage != kind[1] else 0.0
            found[places[kind]].append(_Way(places[op, stage], stage, transfer))
    return found


def _needs(ops: Iterable[Op], num_stages: int) -> dict[_Kind, list[_Kind]]:
    """Return what each op of each stage needs, of the same micro-batch; a B stands for I and W.

    That is one at most: what waits for the backward of the next stage has its own forward by then.
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


def _spare_room(placement: Placement, kinds: Sequence[_Kind]) -> list[dict[int, int]]:
    """Return for each rank, by the place of each of its forwards, how many later stages it has."""
    found: list[dict[int, int]] = [{} for _ in range(placement.num_ranks)]
    for place, (op, stage) in enumerate(kinds):
        if op in STARTS_ACTIVATIONS:
            for rank in placement.holders(stage):
                stages = placement.stages_of(rank)
                found[rank][place] = len(stages) - 1 - stages.index(stage)
    return found
