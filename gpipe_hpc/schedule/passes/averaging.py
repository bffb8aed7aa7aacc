"""Passes for replicas that train apart: no gradient is summed, parameters are averaged at times."""

from dataclasses import replace

from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.schedule import Schedule


def without_reductions(schedule: Schedule) -> Schedule:
    """Drop the ``REDUCE_GRAD`` of stages that one rank of a pipeline holds, and all ``AVERAGE``.

    What is left are the sums over the holders of mirrored stages, within each replica.
    """
    placement = schedule.placement

    def stays(action: Action) -> bool:
        if action.op is Op.REDUCE_GRAD:
            return len(placement.holders(action.stage)) > 1
        return action.op is not Op.AVERAGE

    rows = (tuple(filter(stays, row)) for row in schedule.ranks)
    return replace(schedule, ranks=tuple(rows))


def with_averages(schedule: Schedule) -> Schedule:
    """Return the table of an outer step: what each ``REDUCE_GRAD`` sums is averaged at the end.

    They come behind everything else of their rank, in the order of the reductions: the optimizer's
    step is ahead of them. Gradients are summed as in `without_reductions`.
    """
    kept = without_reductions(schedule)
    rows = (
        row + tuple(a._replace(op=Op.AVERAGE) for a in whole if a.op is Op.REDUCE_GRAD)
        for row, whole in zip(kept.ranks, schedule.ranks, strict=True)
    )
    return replace(schedule, ranks=tuple(rows))
