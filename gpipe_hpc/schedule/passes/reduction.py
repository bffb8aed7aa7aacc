"""Pass that inserts the gradient reductions of each stage after its last backward."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from gpipe_hpc.schedule.table.actions import COMPUTE, SENDS, Op
from gpipe_hpc.schedule.table.lifetimes import ENDS_BACKWARD
from gpipe_hpc.schedule.table.precedence import SEVERAL, Precedence, runs
from gpipe_hpc.schedule.table.rows import Row, RowWriter, numbers_of
from gpipe_hpc.schedule.table.schedule import Schedule


def add_reductions(
    schedule: Schedule, bare: Precedence, buckets: Mapping[int, int] | None = None
) -> Schedule:
    """Insert the ``REDUCE_GRAD`` of each stage after its last ``B`` or ``W`` on each rank.

    One action per bucket, in the order in which a backward completes them, or one for the whole
    stage if `buckets` lacks the stage. Placed after the sends that other ranks wait for, reductions
    overlap with the cool-down. A rank that runs no backward of a stage it holds takes part at the
    end of its list. Stages held by several ranks are reduced in the same order on all of them,
    which excludes deadlocks: the order in which their last backwards finish. A table without
    backward is returned unchanged.

    Args:
        schedule: the table with transfers.
        bare: graph of the table before transfers were added.
        buckets: number of gradient buckets by stage.
    """
    if not schedule.ops & ENDS_BACKWARD:
        return schedule
    turns = _reduction_turns(bare)
    rows = tuple(
        _rank(row, schedule.placement.stages_of(rank), turns, buckets or {})
        for rank, row in enumerate(schedule.rows)
    )
    return replace(schedule, ranks=rows)


def _reduction_turns(graph: Precedence) -> dict[int, int]:
    """Return the stages held by several ranks, with their position in the order of reductions."""
    schedule = graph.schedule
    placement = schedule.placement
    shared = {stage for stage in range(placement.num_stages) if len(placement.holders(stage)) > 1}
    if not shared:
        return {}
    done = [0] * graph.num_nodes
    free_at = [0] * schedule.num_ranks
    latest: dict[int, int] = dict.fromkeys(shared, 0)
    computes = [op in COMPUTE for op, _, _ in graph.kinds]
    ends = [stage in shared and op in ENDS_BACKWARD for op, stage, _ in graph.kinds]
    waited_for = graph.waits.one
    for run in filter(None, runs(graph, graph.waits)):
        rank = graph.ranks[run.start]
        at = free_at[rank]
        for node, which in zip(run, graph.which[run.start : run.stop], strict=True):
            wait = waited_for[node]
            if wait >= 0:
                at = done[wait] if done[wait] > at else at
            elif wait == SEVERAL:
                at = max(at, *map(done.__getitem__, graph.waits.several[node]))
            if computes[which]:
                at += 1
            done[node] = at
            if ends[which]:
                stage = graph.kinds[which][1]
                latest[stage] = max(latest[stage], at)
        free_at[rank] = at
    order = sorted(shared, key=lambda stage: (latest[stage], -stage))
    return {stage: turn for turn, stage in enumerate(order)}


def _rank(
    row: Row,
    stages: tuple[int, ...],
    turns: dict[int, int],
    buckets: Mapping[int, int],
) -> Row:
    """Return the row of one rank with reductions, after the sends of each stage's last backward."""
    writer = RowWriter(row.kinds)
    last = _last_backwards(row)
    in_turn = deque(sorted((stage for stage in stages if stage in turns), key=turns.__getitem__))
    ready: set[int] = set()
    taken = 0
    for at, stage in sorted((at, stage) for stage, at in last.items()):
        ready.add(stage)
        due = [] if stage in turns else [stage]
        while in_turn and (in_turn[0] in ready or in_turn[0] not in last):
            due.append(in_turn.popleft())
        if due:
            end = _after_sends(row, at + 1)
            writer.take(row, taken, end)
            _reduce(writer, due, buckets)
            taken = end
    writer.take(row, taken, len(row))
    idle = [stage for stage in stages if stage not in last and stage not in turns]
    _reduce(writer, (*in_turn, *idle), buckets)
    return writer.row()


def _last_backwards(row: Row) -> dict[int, int]:
    """Return the position of the last backward of each stage."""
    last_of = np.zeros(len(row.kinds), np.intp)
    last_of[numbers_of(row.which)] = np.arange(len(row))  # the last write of each kind remains
    found: dict[int, int] = {}
    for (op, stage, _), last in zip(row.kinds, last_of.tolist(), strict=True):
        if op in ENDS_BACKWARD:
            found[stage] = max(found.get(stage, 0), last)
    return found


def _after_sends(row: Row, at: int) -> int:
    """Return the first position from `at` on that is not a ``SEND``."""
    while at < len(row) and row.kinds[row.which[at]][0] in SENDS:
        at += 1
    return at


def _reduce(writer: RowWriter, stages: Iterable[int], buckets: Mapping[int, int]) -> None:
    """Append the reductions of some stages."""
    for stage in stages:
        if stage not in buckets:
            writer.add((Op.REDUCE_GRAD, stage, None))
        for bucket in range(buckets.get(stage, 0)):
            writer.add((Op.REDUCE_GRAD, stage, None), bucket)
