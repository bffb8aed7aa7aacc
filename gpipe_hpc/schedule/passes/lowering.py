"""Lowering: turn a compute-only table into the table that ranks execute, pass by pass."""

from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.garbage import collector_paused
from gpipe_hpc.schedule.passes.communication import add_communication
from gpipe_hpc.schedule.passes.last_weights import gather_last_weights
from gpipe_hpc.schedule.passes.reduction import add_reductions
from gpipe_hpc.schedule.table.actions import Op
from gpipe_hpc.schedule.table.precedence import build_precedence
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
        schedule = gather_last_weights(schedule)
    graph = build_precedence(schedule)
    return add_reductions(add_communication(graph), graph, buckets)


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forwards of a schedule as a compute-only table, for evaluation."""
    rows = tuple(row.only(lambda kind: kind[0] is Op.F) for row in schedule.rows)
    bounds = tuple(min(1, len(row)) for row in rows)
    return replace(schedule, ranks=rows, max_activations=bounds, max_receives=None, overlaps=())
