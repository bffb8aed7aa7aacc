"""Pass that reorders the last weight gradients of each rank, so that stages finish one by one."""

from collections import Counter
from dataclasses import replace

from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.rows import Row, RowWriter
from gpipe_hpc.schedule.table.schedule import Schedule


def gather_last_weights(schedule: Schedule) -> Schedule:
    """Sort the ``W`` at the end of each rank's list by stage, the stage with the fewest left first.

    Only reductions wait for these ``W``, so no other action moves. The order within a stage is
    kept, so its gradients are accumulated in the same order.
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
