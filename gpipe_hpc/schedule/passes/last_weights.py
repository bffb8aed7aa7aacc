"""Pass: put the last weight gradients of a rank in an order that ends one stage after the other."""

from dataclasses import replace

from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.schedule import Schedule


def gather_last_weights(schedule: Schedule) -> Schedule:
    """Order the ``W`` at the end of each rank's list by stage, that with the fewest left first.

    Nobody waits for them but the reductions, so nothing else of the table moves. Within a stage
    their order stays, so its gradients are the same sums.
    """
    return replace(schedule, ranks=tuple(_by_stage(row) for row in schedule.ranks))


def _by_stage(row: tuple[Action, ...]) -> tuple[Action, ...]:
    start = len(row)
    while start and row[start - 1].op is Op.W:
        start -= 1
    left = row[start:]
    counts = {stage: sum(each.stage == stage for each in left) for stage in {a.stage for a in left}}
    # The last stage's gradients come first of all, so among equals it leaves first.
    return row[:start] + tuple(sorted(left, key=lambda each: (counts[each.stage], -each.stage)))
