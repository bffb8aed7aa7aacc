"""List scheduling: each rank, whenever it is free, starts the best action that is ready."""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.dependencies import dependencies
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD, STARTS_ACTIVATIONS
from gpipe_hpc.schedule.table.rows import Kind, Row, RowWriter
from gpipe_hpc.schedule.table.schedule import Placement

# Of op, stage and micro-batch the key by which a rank chooses: what is ready and has the smallest.
Priority = Callable[[Op, int, int], tuple[int, ...]]


_Kind = tuple[Op, int]
# The micro-batch of what is or will be ready, when, and its priority.
_Waiting = tuple[int, float, tuple[int, ...]]


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
    rows = [writer.row() for writer in state.writers]
    if sum(map(len, rows)) < state.num_actions:
        raise ScheduleError(
            f"list scheduling: stuck, expected room for every stage of a rank at once, got limits "
            f"{rules.limits}; raise them"
        )
    return rows


class _Way(NamedTuple):
    """Whom the end of a kind may make ready: another kind, and what the transfer to it takes."""

    place: int
    stage: int
    transfer: float
    num_needs: int


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
        self.writers = [RowWriter() for _ in range(num_ranks)]
        self.durations = [rules.durations[op][stage] for op, stage in self.kinds]
        self.starts = [op in STARTS_ACTIVATIONS for op, _ in self.kinds]
        self.spare = _spare_room(placement, self.kinds)
        self.ends = [op in ENDS_BACKWARD for op, _ in self.kinds]
        self.ways = _ways(needs, rules.transfers)
        # For each rank and place what is or will be ready.
        self.queues: list[dict[int, list[_Waiting]]] = [{} for _ in range(num_ranks)]
        # By place and micro-batch: how many needs are not met yet, and when the last one was.
        self.unmet: dict[int, tuple[int, float]] = {}
        self.looks: list[tuple[float, int]] = []
        self.num_actions = len(self.kinds) * placement.num_microbatches
        first = self.kinds.index((Op.F, 0))
        for microbatch in range(placement.num_microbatches):
            rank = placement.rank_of(0, microbatch)
            self._wait(first, rank, microbatch, 0.0)
            heapq.heappush(self.looks, (0.0, rank))

    def run(self) -> None:
        """Let ranks look for work, in the order of time, until nobody has any."""
        looks, free_at, best, start = self.looks, self.free_at, self._best, self._start
        while looks:
            now, rank = heapq.heappop(looks)
            if free_at[rank] <= now:
                place = best(rank, now)
                if place is not None:
                    start(place, rank, now)

    def _best(self, rank: int, now: float) -> int | None:
        """Return the place of what a rank runs next; of equals the first that it ever had."""
        room, spare = self._room(rank), self.spare[rank]
        best: int | None = None
        least: tuple[int, ...] = ()
        for place, queue in self.queues[rank].items():
            if not queue:
                continue
            _, ready_at, key = queue[0]
            if ready_at > now or (best is not None and key >= least):
                continue
            if place not in spare or spare[place] < room:
                best, least = place, key
        return best

    def _room(self, rank: int) -> float:
        """Return how many more stage micro-batches may live on a rank."""
        limits = self.rules.limits
        return math.inf if limits is None else limits[rank] - self.live[rank]

    def _wait(self, place: int, rank: int, microbatch: int, ready_at: float) -> None:
        """Queue an action, with its priority: it is compared many times."""
        key = self.rules.priority(*self.kinds[place], microbatch)
        queue = self.queues[rank].setdefault(place, [])
        heapq.heappush(queue, (microbatch, ready_at, key))

    def _start(self, place: int, rank: int, now: float) -> None:
        microbatch, _, _ = heapq.heappop(self.queues[rank][place])
        self.writers[rank].add(self.row_kinds[place], microbatch)
        end = now + self.durations[place] * self.paces[rank]
        self.free_at[rank] = end
        heapq.heappush(self.looks, (end, rank))
        self.live[rank] += self.starts[place] - self.ends[place]
        route = self.placement.routes[self.placement.route_of[microbatch]]
        for follower, stage, transfer, num_needs in self.ways[place]:
            user = route[stage]
            ready_at = end if user == rank else end + transfer
            if num_needs > 1:
                key = follower * len(self.placement.route_of) + microbatch
                missing, latest = self.unmet.pop(key, (num_needs, 0.0))
                ready_at = max(ready_at, latest)
                if missing > 1:
                    self.unmet[key] = missing - 1, ready_at
                    continue
            self._wait(follower, user, microbatch, ready_at)
            # A rank looks at the end of what it runs anyway.
            if ready_at > self.free_at[user] or (ready_at == self.free_at[user] and user != rank):
                heapq.heappush(self.looks, (ready_at, user))


def _ways(needs: Mapping[_Kind, Sequence[_Kind]], transfers: Sequence[float]) -> list[list[_Way]]:
    """Return by place whom the end of a kind may make ready."""
    places = {kind: place for place, kind in enumerate(needs)}
    found: list[list[_Way]] = [[] for _ in needs]
    for (op, stage), needed in needs.items():
        for kind in needed:
            transfer = transfers[min(stage, kind[1])] if stage != kind[1] else 0.0
            found[places[kind]].append(_Way(places[op, stage], stage, transfer, len(needed)))
    return found


def _needs(ops: Iterable[Op], num_stages: int) -> dict[_Kind, list[_Kind]]:
    """Return what each op of each stage needs, of the same micro-batch; a B stands for I and W."""
    full = Op.B in ops
    found: dict[_Kind, list[_Kind]] = {}
    for op in ops:
        for stage in range(num_stages):
            needs = dependencies(Action(op, stage, 0), num_stages, 1)
            kinds = [(Op.B if full and need.op is Op.I else need.op, need.stage) for need in needs]
            found[op, stage] = [kind for kind in kinds if kind[0] in ops]
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
