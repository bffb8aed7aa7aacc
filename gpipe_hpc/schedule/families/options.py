"""Checks of what a schedule is asked for."""

from gpipe_hpc.errors import ScheduleError


def whole(schedule: str, option: str, value: object, least: int = 1) -> int:
    """Return an option that must be a whole number of at least `least`; refuse another."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ScheduleError(
            f"schedule {schedule!r}: {option} must be a whole number, expected {least} or more, "
            f"got {value!r}; correct pipeline.options.{option}"
        )
    return value


def even_ranks(schedule: str, ranks: int) -> None:
    """Refuse an odd number of ranks."""
    if ranks % 2:
        allowed = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise ScheduleError(
            f"schedule {schedule!r}: needs an even number of ranks, as its two directions meet "
            f"between two of them, expected {allowed}, got {ranks}; change pipeline.stages or the "
            f"schedule"
        )
