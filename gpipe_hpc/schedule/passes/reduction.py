"""Pass: reduce the gradients of a stage as soon as its last one is made."""

from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.schedule.table.actions import COMPUTE, SENDS, Action, Op
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD
from gpipe_hpc.schedule.table.precedence import build_precedence, execution_order
from gpipe_hpc.schedule.table.schedule import Schedule


def add_reductions(schedule: Schedule, buckets: Mapping[int, int] | None = None) -> Schedule:
    """Put the ``REDUCE_GRAD`` of every stage on its holders, after its last ``B`` or ``W`` there.

    One for each of the stage's `buckets`, in the order in which a backward completes them; one for
    all of the stage where it is not in there.

    There, behind the send that others wait for, it overlaps the drain. A holder that runs no
    backward of the stage takes part at its end. Stages with several holders are reduced in one
    order on all ranks, that in which the last holder of each is done, so that none wait for one
    another in a circle. A table without any backward stays as it is.
    """
    if not any(action.op in ENDS_BACKWARD for row in schedule.ranks for action in row):
        return schedule
    turns = _turns(schedule)
    rows = tuple(
        _rank(row, schedule.placement.stages_of(rank), turns, buckets or {})
        for rank, row in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=rows)


def _turns(schedule: Schedule) -> dict[int, int]:
    """Return the mirrored stages, each with when its last holder is done, as a turn of its own."""
    placement = schedule.placement
    shared = {stage for stage in range(placement.num_stages) if len(placement.holders(stage)) > 1}
    if not shared:
        return {}
    graph = build_precedence(schedule)
    done = [0] * len(graph.actions)
    free_at = [0] * schedule.num_ranks
    latest: dict[int, int] = dict.fromkeys(shared, 0)
    for node in execution_order(graph, graph.waits):
        op, stage, _, _ = graph.actions[node]
        rank = graph.ranks[node]
        free_at[rank] = max([free_at[rank], *(done[wait] for wait in graph.waits[node])])
        free_at[rank] += op in COMPUTE
        done[node] = free_at[rank]
        if stage in shared and op in ENDS_BACKWARD:
            latest[stage] = max(latest[stage], done[node])
    order = sorted(shared, key=lambda stage: (latest[stage], -stage))
    return {stage: turn for turn, stage in enumerate(order)}


def _rank(
    row: tuple[Action, ...],
    stages: tuple[int, ...],
    turns: dict[int, int],
    buckets: Mapping[int, int],
) -> tuple[Action, ...]:
    """Place the reductions of one rank, behind the sends of the backward they follow."""
    last = {action.stage: at for at, action in enumerate(row) if action.op in ENDS_BACKWARD}
    in_turn = sorted((stage for stage in stages if stage in turns), key=turns.__getitem__)
    placed: list[Action] = []
    ready: set[int] = set()
    due: list[int] = []
    for at, action in enumerate(row):
        if due and action.op not in SENDS:
            placed.extend(reduction for stage in due for reduction in _reductions(stage, buckets))
            due.clear()
        placed.append(action)
        if last.get(action.stage) == at:
            if action.stage not in turns:
                due.append(action.stage)
            ready.add(action.stage)
            while in_turn and (in_turn[0] in ready or in_turn[0] not in last):
                due.append(in_turn.pop(0))
    idle = [stage for stage in stages if stage not in last and stage not in turns]
    for stage in (*due, *in_turn, *idle):
        placed.extend(_reductions(stage, buckets))
    return tuple(placed)


def _reductions(stage: int, buckets: Mapping[int, int]) -> tuple[Action, ...]:
    if stage not in buckets:
        return (Action(Op.REDUCE_GRAD, stage),)
    return tuple(Action(Op.REDUCE_GRAD, stage, bucket) for bucket in range(buckets[stage]))
