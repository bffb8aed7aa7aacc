"""Pass: place recomputation, an R ahead of the backward that needs it."""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.actions import Action, Op
from gpipe_hpc.schedule.table import Schedule

# (the rank's action before a backward or None, the backward) -> does its forward keep everything?
Spares = Callable[[Action | None, Action], bool]


def _spare_none(previous: Action | None, backward: Action) -> bool:
    return False


def _spare_all(previous: Action | None, backward: Action) -> bool:
    return True


def _spare_adjacent(previous: Action | None, backward: Action) -> bool:
    """Spare a forward whose backward follows at once: what is needed next is not worth dropping."""
    return previous == Action(Op.F, backward.stage, backward.microbatch)


RECOMPUTE_MODES: Final = MappingProxyType(
    {"always": _spare_none, "except_last": _spare_adjacent, "never": _spare_all}
)


def add_recompute(schedule: Schedule, mode: str) -> Schedule:
    """Put ``R`` right before every ``B`` or ``I`` whose forward the mode does not spare.

    There it runs ahead of the wait for the gradient and so fills the bubble (GPipe, section 2.3).
    """
    if mode not in RECOMPUTE_MODES:
        raise ScheduleError(
            f"schedule {schedule.name!r}: unknown recompute mode, "
            f"expected one of {', '.join(RECOMPUTE_MODES)}, got {mode!r}"
        )
    spares: Spares = RECOMPUTE_MODES[mode]
    return replace(schedule, ranks=tuple(_rank(actions, spares) for actions in schedule.ranks))


def _rank(actions: tuple[Action, ...], spares: Spares) -> tuple[Action, ...]:
    placed: list[Action] = []
    previous: Action | None = None
    for action in actions:
        if action.op in (Op.B, Op.I) and not spares(previous, action):
            placed.append(Action(Op.R, action.stage, action.microbatch))
        placed.append(action)
        previous = action
    return tuple(placed)
