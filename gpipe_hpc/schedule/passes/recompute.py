"""Pass that inserts recomputation: an ``R`` before the backward that needs it."""

from collections.abc import Callable, Collection
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.table.actions import COMPUTE, Op
from gpipe_hpc.schedule.table.dependencies import users_of
from gpipe_hpc.schedule.table.rows import Row, numbers_of
from gpipe_hpc.schedule.table.schedule import Schedule

_USERS: Final = users_of(Op.R)
# (whether the backward directly follows its forward, whether the stage is the last) -> whether the
# forward keeps its activations, without recomputation.
Spares = Callable[[bool, bool], bool]


def _spare_none(follows: bool, is_last: bool) -> bool:
    return False


def _spare_all(follows: bool, is_last: bool) -> bool:
    return True


def _spare_last(follows: bool, is_last: bool) -> bool:
    """Return whether a forward keeps its activations: on the last stage, if its backward follows.

    Activations that are needed next are not worth dropping. On other stages the rank waits for a
    gradient between the two, and ``R`` fills that time.
    """
    return follows and is_last


RECOMPUTE_MODES: Final = MappingProxyType(
    {"always": _spare_none, "except_last": _spare_last, "never": _spare_all}
)


def add_recompute(schedule: Schedule, mode: str, stages: Collection[int] | None = None) -> Schedule:
    """Insert ``R`` before every ``B`` or ``I`` whose forward the mode recomputes.

    ``R`` runs before the rank waits for the gradient and so fills the bubble (GPipe, section 2.3).

    Args:
        schedule: a compute-only table.
        mode: ``always``, ``except_last`` or ``never``.
        stages: stages with layers to recompute; None means all.
    """
    if mode not in RECOMPUTE_MODES:
        raise ScheduleError(
            f"schedule {schedule.name!r}: unknown recompute mode {mode!r}, "
            f"expected one of {', '.join(RECOMPUTE_MODES)}"
        )
    spares: Spares = RECOMPUTE_MODES[mode]
    last = schedule.num_stages - 1
    recomputed = frozenset(range(last + 1) if stages is None else stages)
    if not recomputed <= frozenset(range(last + 1)):
        raise ScheduleError(
            f"schedule {schedule.name!r}: stages to recompute must be from 0 to {last}, "
            f"got {sorted(recomputed)}"
        )
    rows = tuple(_rank(row, spares, last, recomputed) for row in schedule.rows)
    return replace(schedule, ranks=rows)


def _rank(row: Row, spares: Spares, last_stage: int, stages: Collection[int]) -> Row:
    ops, of_stages, _ = zip(*row.kinds, strict=True) if row.kinds else ((), (), ())
    which, numbers = numbers_of(row.which), numbers_of(row.numbers)
    computes = np.flatnonzero(np.array([op in COMPUTE for op in ops], bool)[which])
    before = np.concatenate((computes[:1], computes[:-1]))  # the previous compute action
    kind, kind_before = which[computes], which[before]
    stage = np.array(of_stages, np.int64)
    is_forward = np.array([op is Op.F for op in ops], bool)
    follows = is_forward[kind_before] & (stage[kind_before] == stage[kind])
    follows &= numbers[before] == numbers[computes]
    spared = np.array([[spares(each, is_last) for is_last in _EITHER] for each in _EITHER])
    again = np.array([op in _USERS and of in stages for op, of, _ in row.kinds], bool)[kind]
    again &= ~spared[follows.astype(int), (stage[kind] == last_stage).astype(int)]
    at = computes[again]
    return row.with_ahead(at, [(Op.R, of, None) for of in of_stages], which[at], numbers[at])


_EITHER: Final = False, True
