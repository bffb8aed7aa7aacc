"""Pass that offloads activations to host memory between the forward and the backward."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import COMPUTE, COPIES, Op
from gpipe_hpc.schedule.table.dependencies import users_of
from gpipe_hpc.schedule.table.lifetimes import bounds_of
from gpipe_hpc.schedule.table.rows import Kind, Row, RowWriter
from gpipe_hpc.schedule.table.schedule import Schedule

# Activations used again within this many compute actions of their rank stay on the device. The copy
# to the host overlaps with the first of these and the copy back with the last; without another one
# in between, the freed memory could not be used.
_NEAR: Final = 3
_USERS: Final = users_of(Op.FETCH)


def add_offload(schedule: Schedule) -> Schedule:
    """Insert ``OFFLOAD`` and ``FETCH`` into a compute-only table, after recomputation.

    ``OFFLOAD`` follows its ``F``; ``FETCH`` comes one compute action before the ``R``, ``B`` or
    ``I`` that uses the activations, so that both copies overlap with compute. Activations used by
    one of the rank's next three compute actions stay on the device. A declared bound of activations
    is reduced accordingly.
    """
    if schedule.is_lowered or schedule.ops & COPIES:
        raise ScheduleError(
            f"schedule {schedule.name!r}: offloading needs a table of compute only, got "
            f"{'a lowered one' if schedule.is_lowered else 'one that offloads already'}"
        )
    rows = tuple(map(_rank, schedule.rows))
    bounds = schedule.max_activations
    if bounds is not None:
        bounds = bounds_of(rows)
    return replace(schedule, ranks=rows, max_activations=bounds)


def _rank(row: Row) -> Row:
    user_of = _users(row)
    fetches: dict[int, list[tuple[Kind, int]]] = defaultdict(list)
    writer = RowWriter(row.kinds)
    for at, (which, number) in enumerate(zip(row.which, row.numbers, strict=True)):
        for fetched in fetches.get(at, ()):
            writer.add(*fetched)
        writer.which.append(which)
        writer.numbers.append(number)
        op, stage, _ = row.kinds[which]
        if op is not Op.F:
            continue
        user = user_of.get((stage, number), 0)
        if user - at > _NEAR:
            writer.add((Op.OFFLOAD, stage, None), number)
            fetches[user - 1].append(((Op.FETCH, stage, None), number))
    return writer.row()


def _users(row: Row) -> Mapping[tuple[int, int], int]:
    """Return the position of the first use of activations, by (stage, micro-batch)."""
    assert row.ops <= COMPUTE, "row contains compute only"
    users: dict[tuple[int, int], int] = {}
    uses = [op in _USERS for op, _, _ in row.kinds]
    for at, (which, number) in enumerate(zip(row.which, row.numbers, strict=True)):
        if uses[which]:
            users.setdefault((row.kinds[which][1], number), at)
    return users
