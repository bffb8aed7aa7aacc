"""Lowering: turn a compute-only table into the table that ranks execute, pass by pass."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.garbage import collector_paused
from gpipe_hpc.schedule.passes.communication import add_communication
from gpipe_hpc.schedule.passes.reduction import add_reductions
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.precedence import build_precedence
from gpipe_hpc.schedule.table.rows import Row, RowWriter
from gpipe_hpc.schedule.table.schedule import Schedule


@collector_paused()
def lower(schedule: Schedule, buckets: Mapping[int, int] | None = None) -> Schedule:
    """Add reductions, sends and receives to a compute-only table; the order of compute is kept.

    `buckets` is the number of gradient buckets by stage; other stages are reduced in one piece.
    With buckets, the last ``W`` of each rank are sorted by stage, so that reductions of the first
    stage overlap with weight gradients of the others.

    Raises:
        ScheduleError: the table is lowered already, is incomplete or deadlocks.
    """
    if schedule.is_lowered:
        raise ScheduleError(
            f"schedule {schedule.name!r}: the table is lowered already, expected compute only"
        )
    if buckets:
        schedule = _sort_last_weights(schedule)
    graph = build_precedence(schedule)
    return add_reductions(add_communication(graph), graph, buckets)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule as a compute-only table, for evaluation."""
    rows = tuple(row.only(lambda kind: kind[0] is Op.F) for row in schedule.rows)
    bounds = tuple(min(1, len(row)) for row in rows)
    return replace(schedule, ranks=rows, max_activations=bounds, max_receives=None, overlaps=())


def _sort_last_weights(schedule: Schedule) -> Schedule:
    """Sort the ``W`` at the end of each rank's list by stage, the stage with the fewest left first.

    So stages finish one by one. Only reductions wait for these ``W``, so no other action moves. The
    order within a stage is kept, so its gradients are accumulated in the same order.
    """
    if Op.W not in schedule.ops:
        return schedule
    return replace(schedule, ranks=tuple(map(_by_stage, schedule.rows)))


def _by_stage(row: Row) -> Row:
    is_weights = [op is Op.W for op, _, _ in row.kinds]
    start = len(row)
    while start and is_weights[row.which[start - 1]]:
        start -= 1
    left = range(start, len(row))
    counts = Counter(row.which[start:])
    stages = [stage for _, stage, _ in row.kinds]
    # The gradients of the last stage are ready first, so it comes first among equals.
    left_in_turn = sorted(left, key=lambda at: (counts[row.which[at]], -stages[row.which[at]]))
    writer = RowWriter(row.kinds)
    for column, own in ((writer.which, row.which), (writer.numbers, row.numbers)):
        column.extend(own[:start])
        column.extend(own[at] for at in left_in_turn)
    return writer.row()
