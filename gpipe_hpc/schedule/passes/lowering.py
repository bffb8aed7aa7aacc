"""Lowering: from a bare table of compute to the table that ranks run, pass by pass."""

from dataclasses import replace

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.garbage import collector_paused
from gpipe_hpc.schedule.passes.communication import add_communication
from gpipe_hpc.schedule.passes.reduction import add_reductions
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.schedule import Schedule


@collector_paused()
def lower(schedule: Schedule) -> Schedule:
    """Add reductions, sends and receives to a bare table; its order of compute stays."""
    if schedule.is_lowered:
        raise ScheduleError(
            f"schedule {schedule.name!r}: is lowered already, expected a bare table of compute"
        )
    return add_reductions(add_communication(schedule))


def forward_only(schedule: Schedule) -> Schedule:
    """Return the bare table of a schedule's forwards, for evaluation; nothing is kept."""
    rows = tuple(tuple(action for action in row if action.op is Op.F) for row in schedule.ranks)
    bounds = tuple(min(1, len(row)) for row in rows)
    return replace(schedule, ranks=rows, max_activations=bounds, max_receives=None, overlaps=())
