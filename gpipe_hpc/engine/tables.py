"""From what a user asked for to the tables that are run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpipe_hpc.errors import ConfigError, ScheduleError
from gpipe_hpc.schedule import (
    Op,
    Schedule,
    add_recompute,
    build,
    check,
    forward_only,
    lower,
    schedule_names,
)


class Tables(NamedTuple):
    """The lowered tables of a pipeline, both checked."""

    training: Schedule
    evaluation: Schedule


def make_tables(
    schedule: str | Schedule,
    *,
    ranks: int,
    microbatches: int,
    recompute: str,
    options: Mapping[str, Any],
) -> Tables:
    """Build, lower and check the tables for `ranks` ranks and one replica's micro-batches.

    A Schedule that is given may be bare or lowered; `recompute` applies to a bare one without R.
    Raises ScheduleError or ConfigError.
    """
    if isinstance(schedule, str):
        bare = build(
            schedule, ranks=ranks, microbatches=microbatches, recompute=recompute, **options
        )
    else:
        bare = _given(schedule, ranks, microbatches, recompute)
    training = bare if bare.is_lowered else lower(bare)
    check(training)
    evaluation = lower(forward_only(bare))
    check(evaluation)
    return Tables(training, evaluation)


def _given(schedule: Schedule, ranks: int, microbatches: int, recompute: str) -> Schedule:
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"schedule: expected a name ({', '.join(schedule_names())}) or a Schedule, got "
            f"{type(schedule).__name__}"
        )
    if (schedule.num_ranks, schedule.num_microbatches) != (ranks, microbatches):
        raise ConfigError(
            f"schedule {schedule.name!r}: expected a table of {ranks} ranks and {microbatches} "
            f"micro-batches, got {schedule.num_ranks} and {schedule.num_microbatches}; change "
            f"stages and microbatches, or the table"
        )
    has_recompute = any(action.op is Op.R for row in schedule.ranks for action in row)
    if schedule.is_lowered or has_recompute:
        return schedule
    return add_recompute(schedule, recompute)
