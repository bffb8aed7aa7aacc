"""Pass that inserts the all-gather of sharded parameters before a stage's first use of them."""

from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.rows import Row, RowWriter
from gpipe_hpc.schedule.table.schedule import Schedule


def add_gathers(schedule: Schedule, buckets: Mapping[int, int]) -> Schedule:
    """Insert the ``UNSHARD`` of each stage before its first forward on each of its ranks.

    `buckets` is the number of buckets by stage. Bucket 0 contains the parameters of the last
    layers, so buckets are gathered in descending order. A rank that runs no forward of the stage
    gathers at its end. A table that already contains ``UNSHARD`` is returned unchanged.
    """
    if Op.UNSHARD in schedule.ops or not any(buckets.values()):
        return schedule
    rows = tuple(
        _rank(row, [s for s in schedule.placement.stages_of(rank) if buckets.get(s)], buckets)
        for rank, row in enumerate(schedule.rows)
    )
    return replace(schedule, ranks=rows)


def _rank(row: Row, stages: list[int], buckets: Mapping[int, int]) -> Row:
    due = dict.fromkeys(stages)
    writer = RowWriter(row.kinds)

    def place(stage: int) -> None:
        for number in reversed(range(buckets[stage])):
            writer.add((Op.UNSHARD, stage, None), number)

    starts = [
        (row.which.index(which), stage)
        for which, (op, stage, _) in enumerate(row.kinds)
        if op is Op.F and stage in due
    ]
    taken = 0
    for at, stage in sorted(starts):
        del due[stage]
        writer.take(row, taken, at)
        place(stage)
        taken = at
    writer.take(row, taken, len(row))
    for stage in due:
        place(stage)
    return writer.row()
