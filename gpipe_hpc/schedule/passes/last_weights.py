"""Pass: put the last weight gradients of a rank in an order that ends one stage after the other."""

from collections import Counter
from dataclasses import replace

from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.rows import Row, RowWriter
from gpipe_hpc.schedule.table.schedule import Schedule


def gather_last_weights(schedule: Schedule) -> Schedule:
    """Order the ``W`` at the end of each rank's list by stage, that with the fewest left first.

    Nobody waits for them but the reductions, so nothing else of the table moves. Within a stage
    their order stays, so its gradients are the same sums.
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
    # The last stage's gradients come first of all, so among equals it leaves first.
    left_in_turn = sorted(left, key=lambda at: (counts[row.which[at]], -stages[row.which[at]]))
    writer = RowWriter(row.kinds)
    for column, own in ((writer.which, row.which), (writer.numbers, row.numbers)):
        column.extend(own[:start])
        column.extend(own[at] for at in left_in_turn)
    return writer.row()
