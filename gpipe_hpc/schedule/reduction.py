"""Pass: reduce the gradients of a stage as soon as its last one is made."""

from dataclasses import replace

from gpipe_hpc.schedule.actions import SENDS, Action, Op
from gpipe_hpc.schedule.table import Schedule


def add_reductions(schedule: Schedule) -> Schedule:
    """Put one ``REDUCE_GRAD`` on every holder of a stage, after its last ``B`` or ``W`` there.

    There, behind the send that others wait for, it overlaps the drain. A holder that runs no
    backward of the stage takes part at its end. A table without any backward stays as it is.
    """
    if not any(action.op in (Op.B, Op.W) for row in schedule.ranks for action in row):
        return schedule
    rows = tuple(
        _rank(row, schedule.placement.stages_of(rank)) for rank, row in enumerate(schedule.ranks)
    )
    return replace(schedule, ranks=rows)


def _rank(row: tuple[Action, ...], stages: tuple[int, ...]) -> tuple[Action, ...]:
    """Place the reductions of one rank, behind the sends of the backward they follow."""
    last = {action.stage: at for at, action in enumerate(row) if action.op in (Op.B, Op.W)}
    placed: list[Action] = []
    due: list[Action] = []
    for at, action in enumerate(row):
        if action.op not in SENDS:
            placed.extend(due)
            due.clear()
        placed.append(action)
        if last.get(action.stage) == at:
            due.append(Action(Op.REDUCE_GRAD, action.stage))
    placed.extend(due)
    placed.extend(Action(Op.REDUCE_GRAD, stage) for stage in stages if stage not in last)
    return tuple(placed)
