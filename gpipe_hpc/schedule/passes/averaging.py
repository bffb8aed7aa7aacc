"""Passes for local SGD: drop gradient reductions, and average parameters at outer steps."""

from dataclasses import replace

from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.rows import NO_NUMBER, Kind, Row, RowWriter
from gpipe_hpc.schedule.table.schedule import Schedule


def without_reductions(schedule: Schedule) -> Schedule:
    """Return the table of a step in which replicas do not communicate.

    All ``AVERAGE`` and the ``REDUCE_GRAD`` of stages held by one rank of a pipeline are dropped.
    Reductions over ranks that share a stage within a replica (mirrored placements) remain.
    """
    placement = schedule.placement

    def stays(kind: Kind) -> bool:
        op, stage, _ = kind
        if op is Op.REDUCE_GRAD:
            return len(placement.holders(stage)) > 1
        return op is not Op.AVERAGE

    return replace(schedule, ranks=tuple(row.only(stays) for row in schedule.rows))


def with_averages(schedule: Schedule) -> Schedule:
    """Return the table of an outer step: an ``AVERAGE`` for each ``REDUCE_GRAD``, at the end.

    Averages come after all other actions of their rank and after the optimizer step, in the order
    of the reductions. Gradients are reduced as in `without_reductions`.
    """
    kept = without_reductions(schedule)
    return replace(schedule, ranks=tuple(map(_add_averages, kept.rows, schedule.rows)))


def _add_averages(row: Row, whole: Row) -> Row:
    writer = RowWriter.on(row)
    for _, stage, bucket, _ in whole.only(lambda kind: kind[0] is Op.REDUCE_GRAD):
        writer.add((Op.AVERAGE, stage, None), NO_NUMBER if bucket is None else bucket)
    return writer.row()
