"""The schedules known by name."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.gpipe import gpipe
from gpipe_hpc.schedule.one_f_one_b import one_f_one_b
from gpipe_hpc.schedule.recompute import add_recompute
from gpipe_hpc.schedule.table import Schedule

# Each takes (ranks, microbatches) and its own options as further keywords.
SCHEDULES: Final[Mapping[str, Callable[..., Schedule]]] = MappingProxyType(
    {"gpipe": gpipe, "one_f_one_b": one_f_one_b}
)


def schedule_names() -> tuple[str, ...]:
    """Return the names that `build` knows."""
    return tuple(SCHEDULES)


def build(
    name: str, *, ranks: int, microbatches: int, recompute: str = "never", **options: Any
) -> Schedule:
    """Build the bare table of compute of a schedule known by name.

    `microbatches` counts those of a whole pipeline's step; `recompute` is ``always``,
    ``except_last`` or ``never``; `options` are the schedule's own keywords.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"schedule: unknown name, expected one of {', '.join(SCHEDULES)}, got {name!r}"
        )
    function = SCHEDULES[name]
    known = [key for key in inspect.signature(function).parameters if key not in _COUNTS]
    for option in options:
        if option not in known:
            raise ScheduleError(
                f"schedule {name!r}: unknown option, expected "
                f"{'one of ' + ', '.join(known) if known else 'no options'}, got {option!r}"
            )
    _check_count(name, "ranks", ranks)
    _check_count(name, "microbatches", microbatches)
    bare = function(ranks=ranks, microbatches=microbatches, **options)
    return add_recompute(bare, recompute)


_COUNTS: Final = ("ranks", "microbatches")


def _check_count(name: str, what: str, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ScheduleError(
            f"schedule {name!r}: {what} must be a whole number, expected 1 or more, got {count!r}"
        )
