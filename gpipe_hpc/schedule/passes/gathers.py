"""Pass: let parameters that are divided over the holders of a stage be there when it needs them."""

from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.schedule.table.actions import Action, Op
from gpipe_hpc.schedule.table.schedule import Schedule


def add_gathers(schedule: Schedule, buckets: Mapping[int, int]) -> Schedule:
    """Put the ``UNSHARD`` of the `buckets` of each stage ahead of its first forward on a holder.

    Bucket 0 has the parameters of the last layers, so the highest number comes first. A holder that
    runs no forward of the stage has them at its end. A table that has its own stays as it is.
    """
    if any(action.op is Op.UNSHARD for row in schedule.ranks for action in row):
        return schedule
    rows = tuple(
        _rank(row, [s for s in schedule.placement.stages_of(rank) if buckets.get(s)], buckets)
        for rank, row in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=rows)


def _rank(
    row: tuple[Action, ...], stages: list[int], buckets: Mapping[int, int]
) -> tuple[Action, ...]:
    due = {
        stage: [Action(Op.UNSHARD, stage, number) for number in reversed(range(buckets[stage]))]
        for stage in stages
    }
    placed: list[Action] = []
    for action in row:
        if action.op is Op.F:
            placed += due.pop(action.stage, ())
        placed.append(action)
    for left in due.values():
        placed += left
    return tuple(placed)
