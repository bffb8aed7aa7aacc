"""Pass: place recomputation, an R ahead of the backward that needs it."""

from collections.abc import Callable, Collection
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import COMPUTE, Action, Op
from gpipe_hpc.schedule.table.dependencies import users_of
from gpipe_hpc.schedule.table.schedule import Schedule

_USERS: Final = users_of(Op.R)
# (the rank's action before a backward or None, the backward, the last stage) -> does its forward
# keep everything?
Spares = Callable[[Action | None, Action, int], bool]


def _spare_none(previous: Action | None, backward: Action, last_stage: int) -> bool:
    return False


def _spare_all(previous: Action | None, backward: Action, last_stage: int) -> bool:
    return True


def _spare_last(previous: Action | None, backward: Action, last_stage: int) -> bool:
    """Spare a forward whose backward follows at once: what is needed next is not worth dropping.

    Only on the last stage does it follow at once; elsewhere it waits for a gradient, and R is free.
    """
    follows = previous == Action(Op.F, backward.stage, backward.microbatch)
    return follows and backward.stage == last_stage


RECOMPUTE_MODES: Final = MappingProxyType(
    {"always": _spare_none, "except_last": _spare_last, "never": _spare_all}
)


def add_recompute(schedule: Schedule, mode: str, stages: Collection[int] | None = None) -> Schedule:
    """Put ``R`` right before every ``B`` or ``I`` whose forward the mode does not spare.

    There it runs ahead of the wait for the gradient and so fills the bubble (GPipe, section 2.3).
    `stages` are those that have anything to recompute, None for all; the others get no ``R``.
    """
    if mode not in RECOMPUTE_MODES:
        raise ScheduleError(
            f"schedule {schedule.name!r}: unknown recompute mode, "
            f"expected one of {', '.join(RECOMPUTE_MODES)}, got {mode!r}"
        )
    spares: Spares = RECOMPUTE_MODES[mode]
    last = schedule.num_stages - 1
    recomputed = frozenset(range(last + 1) if stages is None else stages)
    if not recomputed <= frozenset(range(last + 1)):
        raise ScheduleError(
            f"schedule {schedule.name!r}: stages to recompute, expected some of 0 to {last}, "
            f"got {sorted(recomputed)}"
        )
    rows = tuple(_rank(actions, spares, last, recomputed) for actions in schedule.ranks)
    return replace(schedule, ranks=rows)


def _rank(
    actions: tuple[Action, ...], spares: Spares, last_stage: int, stages: Collection[int]
) -> tuple[Action, ...]:
    placed: list[Action] = []
    previous: Action | None = None
    for action in actions:
        asks = action.op in _USERS and action.stage in stages
        if asks and not spares(previous, action, last_stage):
            placed.append(Action(Op.R, action.stage, action.microbatch))
        placed.append(action)
        if action.op in COMPUTE:
            previous = action
    return tuple(placed)
