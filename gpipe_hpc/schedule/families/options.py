"""Checks of the options of a schedule."""

from gpipe_hpc.errors import ScheduleError


def check_integer(schedule: str, option: str, value: object, least: int = 1) -> int:
    """Return an option that must be an integer of at least `least`, or raise `ScheduleError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ScheduleError(
            f"schedule {schedule!r}: {option} must be a whole number of {least} or more, "
            f"got {value!r}; set pipeline.options.{option}"
        )
    return value


def even_ranks(schedule: str, ranks: int) -> None:
    """Raise `ScheduleError` for an odd number of ranks."""
    if ranks % 2:
        allowed = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise ScheduleError(
            f"schedule {schedule!r}: needs an even number of ranks for its two directions, such as "
            f"{allowed}, got {ranks}; change pipeline.stages or the schedule"
        )
