"""Pass: keep what a forward made in the host's memory until its backward is near."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import COMPUTE, COPIES, Action, Op
from gpipe_hpc.schedule.table.dependencies import users_of
from gpipe_hpc.schedule.table.lifetimes import bounds_of
from gpipe_hpc.schedule.table.schedule import Schedule

# What is used again within so many compute actions of its rank stays.
_NEAR: Final = 2
_USERS: Final = users_of(Op.FETCH)


def add_offload(schedule: Schedule) -> Schedule:
    """Add ``OFFLOAD`` and ``FETCH`` to a bare table, recomputation included.

    ``OFFLOAD`` stands right behind its ``F``, ``FETCH`` one compute action ahead of the ``R``,
    ``B`` or ``I`` that uses it, so that both copies overlap compute. What is used by the rank's
    next compute action, or the one after it, stays. A declared bound of activations shrinks to what
    the table then keeps.
    """
    if schedule.is_lowered or any(a.op in COPIES for row in schedule.ranks for a in row):
        raise ScheduleError(
            f"schedule {schedule.name!r}: offloading is for a bare table of compute, expected one, "
            f"got {'a lowered one' if schedule.is_lowered else 'one that offloads already'}"
        )
    rows = tuple(map(_rank, schedule.ranks))
    bounds = schedule.max_activations
    if bounds is not None:
        bounds = bounds_of(rows)
    return replace(schedule, ranks=rows, max_activations=bounds)


def _rank(row: tuple[Action, ...]) -> tuple[Action, ...]:
    user_of = _users(row)
    fetches: dict[int, list[Action]] = defaultdict(list)
    placed: list[Action] = []
    for at, action in enumerate(row):
        placed += fetches.get(at, ())
        placed.append(action)
        user = user_of.get(action, 0)
        if action.op is Op.F and user - at > _NEAR:
            placed.append(action._replace(op=Op.OFFLOAD))
            fetches[user - 1].append(action._replace(op=Op.FETCH))
    return tuple(placed)


def _users(row: Sequence[Action]) -> Mapping[Action, int]:
    """Return for each forward where on its rank what it made is used first."""
    assert all(action.op in COMPUTE for action in row), "a table of compute"
    users: dict[Action, int] = {}
    for at, action in enumerate(row):
        if action.op in _USERS:
            users.setdefault(action._replace(op=Op.F), at)
    return users
