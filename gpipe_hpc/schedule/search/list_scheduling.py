"""List scheduling: each rank, whenever it is free, starts the best action that is ready."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.dependencies import dependencies
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD, STARTS_ACTIVATIONS
from gpipe_hpc.schedule.table.schedule import Placement

# The action that a rank runs first among those that are ready: the one with the smallest key.
Priority = Callable[[Action], tuple[int, ...]]


_Kind = tuple[Op, int]


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


def list_schedule(placement: Placement, rules: Rules) -> list[list[Action]]:
    """Return each rank's order of F and B, or F, I and W; refuse limits under which it gets stuck.

    A stage's micro-batches run in order. A forward into a stage leaves room under the limit for one
    micro-batch in each later stage of its rank, without which the pipeline could stop.
    """
    state = _State(placement, rules)
    state.run()
    rows = state.rows
    if sum(map(len, rows)) < state.num_actions:
        raise ScheduleError(
            f"list scheduling: stuck, expected room for every stage of a rank at once, got limits "
            f"{rules.limits}; raise them"
        )
    return rows


class _State:
    """What has been started, what is ready, and when each rank looks next."""

    def __init__(self, placement: Placement, rules: Rules) -> None:
        self.placement, self.rules = placement, rules
        num_ranks, num_stages = placement.num_ranks, placement.num_stages
        self.rows: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.free_at = [0.0] * num_ranks
        self.paces = self.rules.paces or [1.0] * num_ranks
        self.live = [0] * num_ranks
        self.spare = _spare_room(placement)
        # For each rank, op and stage the micro-batches that are or will be ready, and when.
        self.queues: list[dict[_Kind, list[tuple[int, float]]]] = [{} for _ in range(num_ranks)]
        # By op, stage and micro-batch: plain tuples, as there are millions.
        self.missing: dict[tuple[Op, int, int], int] = {}
        self.ready_at: dict[tuple[Op, int, int], float] = {}
        self.looks: list[tuple[float, int]] = []
        self.needs = _needs(rules.durations, num_stages)
        self.followers: dict[_Kind, list[_Kind]] = defaultdict(list)
        for kind, needs in self.needs.items():
            for need in needs:
                self.followers[need].append(kind)
        self.num_actions = len(rules.durations) * num_stages * placement.num_microbatches
        for microbatch in range(placement.num_microbatches):
            self._offer((Op.F, 0, microbatch), 0.0)

    def run(self) -> None:
        """Let ranks look for work, in the order of time, until nobody has any."""
        while self.looks:
            now, rank = heapq.heappop(self.looks)
            if self.free_at[rank] <= now:
                action = self._best(rank, now)
                if action is not None:
                    self._start(action, rank, now)

    def _best(self, rank: int, now: float) -> Action | None:
        best: tuple[tuple[int, ...], Action] | None = None
        for (op, stage), queue in self.queues[rank].items():
            if not queue or queue[0][1] > now or not self._has_room(op, stage, rank):
                continue
            action = Action(op, stage, queue[0][0])
            key = self.rules.priority(action)
            if best is None or key < best[0]:
                best = (key, action)
        return best[1] if best else None

    def _has_room(self, op: Op, stage: int, rank: int) -> bool:
        if op not in STARTS_ACTIVATIONS or self.rules.limits is None:
            return True
        return self.live[rank] + self.spare[stage, rank] < self.rules.limits[rank]

    def _start(self, action: Action, rank: int, now: float) -> None:
        op, stage, microbatch, _ = action
        assert microbatch is not None, f"{action} has no micro-batch"
        heapq.heappop(self.queues[rank][op, stage])
        self.rows[rank].append(action)
        end = now + self.rules.durations[op][stage] * self.paces[rank]
        self.free_at[rank] = end
        heapq.heappush(self.looks, (end, rank))
        self.live[rank] += (op in STARTS_ACTIVATIONS) - (op in ENDS_BACKWARD)
        for next_op, next_stage in self.followers[op, stage]:
            arrival = end
            if self.placement.rank_of(next_stage, microbatch) != rank:
                arrival += self.rules.transfers[min(stage, next_stage)]
            self._provide((next_op, next_stage, microbatch), arrival)

    def _provide(self, action: tuple[Op, int, int], when: float) -> None:
        """Note that one of an action's needs is met at a time."""
        later = max(when, self.ready_at.pop(action, 0.0))
        missing = self.missing.pop(action, None)
        missing = (len(self.needs[action[:2]]) if missing is None else missing) - 1
        if missing:
            self.missing[action], self.ready_at[action] = missing, later
        else:
            self._offer(action, later)

    def _offer(self, action: tuple[Op, int, int], when: float) -> None:
        op, stage, microbatch = action
        rank = self.placement.rank_of(stage, microbatch)
        heapq.heappush(self.queues[rank].setdefault((op, stage), []), (microbatch, when))
        heapq.heappush(self.looks, (when, rank))


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


def _spare_room(placement: Placement) -> dict[tuple[int, int], int]:
    """Return for each stage and holder how many later stages the rank holds."""
    return {
        (stage, rank): len([other for other in placement.stages_of(rank) if other > stage])
        for stage in range(placement.num_stages)
        for rank in placement.holders(stage)
    }
