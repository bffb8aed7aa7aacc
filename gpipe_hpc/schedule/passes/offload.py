"""Pass: keep what a forward made in the host's memory until its backward is near."""

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

# What is used again within so many compute actions of its rank stays. Beside the first of them it
# would leave, and beside the last come back: without one in between nobody could use its memory.
_NEAR: Final = 3
_USERS: Final = users_of(Op.FETCH)


def add_offload(schedule: Schedule) -> Schedule:
    """Add ``OFFLOAD`` and ``FETCH`` to a bare table that includes recomputation.

    ``OFFLOAD`` follows its ``F``; ``FETCH`` comes one compute action before the ``R``, ``B`` or
    ``I`` that uses it, so that both copies overlap with compute. Activations used by one of the
    rank's next three compute actions stay. A declared bound of activations shrinks accordingly.
    """
    if schedule.is_lowered or schedule.ops & COPIES:
        raise ScheduleError(
            f"schedule {schedule.name!r}: offloading is for a bare table of compute, expected one, "
            f"got {'a lowered one' if schedule.is_lowered else 'one that offloads already'}"
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
    """Return for each forward, by stage and micro-batch, where what it made is used first."""
    assert row.ops <= COMPUTE, "a table of compute"
    users: dict[tuple[int, int], int] = {}
    uses = [op in _USERS for op, _, _ in row.kinds]
    for at, (which, number) in enumerate(zip(row.which, row.numbers, strict=True)):
        if uses[which]:
            users.setdefault((row.kinds[which][1], number), at)
    return users
